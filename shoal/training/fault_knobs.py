"""Ranks made slow or dead on purpose, and what each rank spent its time on: who waits, and who does not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from shoal.base.errors import UsageError
from shoal.engine.device import Stopwatch
from shoal.pipeline.program import COMPUTE, Action
from shoal.spec.config import TrainConfig
from shoal.training.step.engine import Engine, StepResult

MOST = 1000  # times as slow: of longer sleeps a run would only look hung


@dataclass(frozen=True)
class Handicaps:
    """What is asked for, by rank.

    Attributes:
        factors: how many times as long as it would a rank's computing takes.
        deaths: the step, from 0, before which a rank kills itself; where it takes only some of the steps, before the
            first one from there on.
        pace: the least seconds that a step's computing takes, before factors.
    """

    factors: dict[int, float]
    deaths: dict[int, int]
    pace: float

    @staticmethod
    def of(train: TrainConfig, ranks: int, *, begin: int = 0, restarted: bool = False) -> Handicaps:
        """Read ``train.straggler``, ``train.dead`` and ``train.pace``. After a restart nobody dies once more.

        Args:
            begin: the step at which this attempt begins: deaths before it are over.

        Raises:
            UsageError: one is not written as it should be, or names a rank that there is not.
        """
        factors = _read("train.straggler", train.straggler, "=", r"\d+(\.\d+)?", "1=4", ranks)
        deaths = _read("train.dead", train.dead, "@", r"\d+", "1@20", ranks)
        for rank, factor in factors.items():
            if not 1 <= float(factor) <= MOST:
                raise UsageError(f"train.straggler = '{rank}={factor}': a factor of 1 to {MOST}.")
        dying = {rank: int(step) for rank, step in deaths.items() if int(step) >= begin and not restarted}
        return Handicaps({rank: float(factor) for rank, factor in factors.items()}, dying, train.pace)

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self.factors or self.deaths or self.pace)

    def survivors(self, living: Iterable[int]) -> list[str]:
        """A line for each rank that lives at the end of a run in which it was to die."""
        return [
            f"train.dead: rank {rank} did not die, since it was given no step from {self.deaths[rank]} on"
            for rank in living if rank in self.deaths
        ]


def _read(name: str, text: str, sign: str, value: str, example: str, ranks: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for word in filter(None, text.split(",")):
        match = re.fullmatch(rf"(\d+){sign}({value})", word.strip())
        if not match:
            raise UsageError(f"{name} = {text!r}: write it as in {name} = '{example}', with commas between several.")
        if int(match[1]) >= ranks:
            raise UsageError(f"{name} = {text!r}: there is no rank {match[1]}, the last is {ranks - 1}.")
        found[int(match[1])] = match[2]
    return found


@dataclass
class RankTimes:
    """Of one rank, in steps alone (no validation, no checkpoints) [s].

    Attributes:
        steps: that it made.
        computing: in forwards and backwards, with what a straggler sleeps.
        total: in whole steps.
    """

    steps: int = 0
    computing: float = 0.0
    total: float = 0.0

    @property
    def waiting(self) -> float:
        """All that is not computing: waiting for others, exchanging with them, and the update."""
        return self.total - self.computing


class Watch:
    """A `Recorder` that handicaps a rank and counts its time. It wraps the engine's ``step``.

    Nothing of a step waits for the device, but the sleep of a handicapped rank for what it computed before.
    """

    def __init__(self, engine: Engine, handicaps: Handicaps):
        rank = engine.mesh.rank
        self.factor, self.death = handicaps.factors.get(rank, 1.0), handicaps.deaths.get(rank)
        self.pace, self.times = handicaps.pace, RankTimes()
        self._of_step = sum(action.op in COMPUTE for action in engine.runtime.actions)
        self._step, self._clock = engine.step, Stopwatch(engine.mesh.device)
        engine.step = self.step  # type: ignore[method-assign, assignment]  # it returns what the engine's own does
        engine.runtime.recorders.append(self)

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult | None:
        """The engine's step, unless this rank dies first."""
        if self.death is not None and step >= self.death:
            os.kill(os.getpid(), signal.SIGKILL)
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._slept = 0.0
        self._clock.start()
        whole = [self._clock.mark()]
        result = self._step(step, stop=stop, dry=dry)
        begin, end = self._clock.seconds([*whole, self._clock.mark()])
        self.times.computing += self._computed() + self._slept
        self.times.total += end - begin
        self.times.steps += 1
        return result

    def begin(self, action: Action) -> None:
        """As `Recorder`."""
        self._begin = self._clock.mark()

    def arrived(self, action: Action) -> None:
        """As `Recorder`: waiting for a neighbour in the pipeline is not computing."""
        self._begin = self._clock.mark()

    def end(self, action: Action) -> None:
        """As `Recorder`. After the step's last computation a handicapped rank sleeps."""
        if action.op not in COMPUTE:
            return
        self._begins.append(self._begin)
        self._ends.append(self._clock.mark())
        if len(self._ends) == self._of_step and (self.factor > 1 or self.pace):
            computed = self._computed()
            self._slept = max(computed, self.pace) * self.factor - computed
            time.sleep(self._slept)

    def _computed(self) -> float:
        return sum(self._clock.seconds(self._ends)) - sum(self._clock.seconds(self._begins))


def who_waits(times: dict[int, RankTimes | None]) -> Table:
    """The table that a run shows at its end; None for a rank that died."""
    table = Table(title="who waits, and who does not")
    for column in ("rank", "steps", "computing s", "waiting and exchanging s", "share"):
        table.add_column(column, justify="right")
    for rank, spent in sorted(times.items()):
        if spent is None:
            table.add_row(str(rank), "died", "", "", "")
            continue
        share = spent.waiting / spent.total if spent.total else 0.0
        table.add_row(
            str(rank), str(spent.steps), f"{spent.computing:.2f}", f"{spent.waiting:.2f}", f"{100 * share:.0f} %"
        )
    return table
