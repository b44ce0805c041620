"""Artificially slow and dead ranks (``[testing]``), and the compute and wait time of each rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rich.table import Table

from shoal.base.errors import UsageError
from shoal.pipeline.program import COMPUTE, Action
from shoal.spec.config.sections import TestingConfig
from shoal.training.records.timer import ActionTimer
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import StepResult

LARGEST_FACTOR = 1000  # of a straggler: with longer sleeps a run would look hung


@dataclass(frozen=True)
class FaultKnobs:
    """Settings of section ``[testing]``, by rank.

    Attributes:
        factors: slowdown factor of a rank's compute time.
        deaths: step, from 0, before which a rank kills itself; a rank that runs only some of the steps dies before its
            first step from there on.
        pace: minimum compute time per step before factors [s].
    """

    factors: dict[int, float]
    deaths: dict[int, int]
    pace: float

    @staticmethod
    def read(config: TestingConfig, ranks: int, *, begin: int = 0, restarted: bool = False) -> FaultKnobs:
        """Parse the knobs of a run. After a restart no rank dies again.

        Args:
            begin: first step of this attempt; earlier deaths are dropped.

        Raises:
            UsageError: a setting is malformed or names a rank that does not exist.
        """
        factors = _by_rank("testing.straggler", config.straggler, "=", r"\d+(\.\d+)?", "1=4", ranks)
        deaths = _by_rank("testing.kill", config.kill, "@", r"\d+", "1@20", ranks)
        for rank, factor in factors.items():
            if not 1 <= factor <= LARGEST_FACTOR:
                raise UsageError(f"testing.straggler = '{rank}={factor:g}': a factor of 1 to {LARGEST_FACTOR}.")
        dying = {rank: int(step) for rank, step in deaths.items() if step >= begin and not restarted}
        return FaultKnobs(factors, dying, config.min_step_seconds)

    @property
    def any(self) -> bool:
        return bool(self.factors or self.deaths or self.pace)


def _by_rank(name: str, text: str, sign: str, value: str, example: str, ranks: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for word in filter(None, text.split(",")):
        match = re.fullmatch(rf"(\d+){sign}({value})", word.strip())
        if not match:
            raise UsageError(f"{name} = {text!r}: write it as in {name} = '{example}', with commas between several.")
        if int(match[1]) >= ranks:
            raise UsageError(f"{name} = {text!r}: rank {match[1]} does not exist; ranks are 0 to {ranks - 1}.")
        found[int(match[1])] = float(match[2])
    return found


@dataclass
class RankTimes:
    """Time of one rank in training steps, without validation and checkpoints [s]."""

    steps: int = 0
    computing: float = 0.0  # in forwards and backwards, including a straggler's sleep
    total: float = 0.0  # in steps

    @property
    def waiting(self) -> float:
        """Time not spent computing: waiting for other ranks, communication and the update."""
        return self.total - self.computing


class TimedSteps(ActionTimer):
    """Wrapper of ``engine.step`` that applies the knobs to this rank and measures its times.

    A step never waits for the device, except that a straggler waits for its preceding computations before it sleeps.
    """

    def __init__(self, engine: Engine, knobs: FaultKnobs):
        super().__init__(engine.mesh.device)
        rank = engine.mesh.rank
        self.factor, self.death, self.pace = knobs.factors.get(rank, 1.0), knobs.deaths.get(rank), knobs.pace
        self.times = RankTimes()
        self._computations = sum(action.op in COMPUTE for action in engine.runtime.actions)
        engine.step = partial(self.step, engine.step)  # type: ignore[method-assign]
        engine.runtime.recorders.append(self)

    def step(self, run, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        """Run the engine's step, unless this rank dies first."""
        if self.death is not None and step >= self.death:
            os.kill(os.getpid(), signal.SIGKILL)
        self.start()
        self._left, self._slept = self._computations, 0.0
        begin = self.clock.mark()
        result = run(step, stop=stop, dry=dry)
        begin, end = self.clock.seconds([begin, self.clock.mark()])
        self.times.computing += self.compute_seconds() + self._slept
        self.times.total += end - begin
        self.times.steps += 1
        return result

    def end(self, action: Action) -> None:
        """End an action; after the last computation of a step, a straggler sleeps."""
        super().end(action)
        if action.op not in COMPUTE:
            return
        self._left -= 1
        if self._left == 0 and (self.factor > 1 or self.pace):
            computed = self.compute_seconds()
            self._slept = max(computed, self.pace) * self.factor - computed
            time.sleep(self._slept)


def times_table(times: Mapping[int, RankTimes | None]) -> Table:
    """Build the table of times that a run shows at its end; None for a rank that died."""
    table = Table(title="compute and wait time of each rank")
    for column in ("rank", "steps", "computing s", "waiting and exchanging s", "share"):
        table.add_column(column, justify="right")
    for rank, spent in sorted(times.items()):
        row = ["died", "", "", ""]
        if spent is not None:
            share = spent.waiting / spent.total if spent.total else 0.0
            row = [str(spent.steps), f"{spent.computing:.2f}", f"{spent.waiting:.2f}", f"{100 * share:.0f} %"]
        table.add_row(str(rank), *row)
    return table
