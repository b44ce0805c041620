"""Races: time contenders that do the same work in turn on the same cores, and compare them.

Times on a shared machine drift by more than the differences of interest. So contenders take turns, A B A B, and medians
over many turns are compared. `time_in_turns` times functions of one process, `run` trainings in processes of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TypeVar

import torch

from shoal.engine.device import synchronize
from shoal.labs.bench.benchmark import Row, Say
from shoal.labs.bench.contender import Contender, ContenderProcesses, ContenderTurn

K = TypeVar("K")
CPU = torch.device("cpu")

COMPARED = 16
"""Steps: what differs between contenders is rounding, and training makes more of it with every step."""


class Disagreement(RuntimeError):
    """Two contenders computed different losses, so they did not do the same work."""


@dataclass(frozen=True)
class Race:
    """Who runs against whom.

    Attributes:
        name: as in ``--only``.
        ours: shoal's contenders.
        references: torch's; the fastest of them counts.
        target: ours must reach this many times the speed of the reference (or this share of a peak).
        fastest: whether the fastest of ours has to reach it, and not each.
        also: contenders that are shown, and are no reference.
        bounds: contenders that leave a part of the work out, and so compute other losses: what ours can come close to.
        tolerance: relative difference of losses that rounding may cause; None where nothing is comparable.
    """

    name: str
    ours: tuple[Contender, ...]
    references: tuple[Contender, ...]
    target: float
    also: tuple[Contender, ...] = ()
    bounds: tuple[Contender, ...] = ()
    tolerance: float | None = 1e-3
    fastest: bool = False


@dataclass
class Lap:
    """All turns of one contender."""

    contender: Contender
    turns: list[ContenderTurn] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return median(second for turn in self.turns for second in turn.seconds)

    @property
    def losses(self) -> list[float]:
        return [loss for turn in self.turns for loss in turn.losses]

    def rate(self, turn: int | None = None) -> float:
        """FLOP/s, in one turn or overall."""
        seconds = self.median if turn is None else median(self.turns[turn].seconds)
        return self.contender.workload.flops / seconds


def time_in_turns(
    contenders: Mapping[K, Callable[[], object]], turns: int, *, warmup: int = 1,
    prepare: Callable[[K], object] = lambda name: None, in_a_row: int = 1, device: torch.device = CPU,
) -> dict[K, list[float]]:
    """Time functions of this process, A B C A B C; returns the seconds of a call of each in every turn.

    Args:
        warmup: turns before, which are not timed.
        prepare: called with the name of a contender before its clock starts, as a barrier or to fill its buffers.
        in_a_row: calls in a turn.
        device: the work that is queued on it counts.
    """
    seconds: dict[K, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + turns):
        for name, call in contenders.items():
            prepare(name)
            synchronize(device)
            start = time.perf_counter()
            for _ in range(in_a_row):
                call()
            synchronize(device)
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - start) / in_a_row)
    return seconds


def slowest_rank(ranks: Sequence[Mapping[K, Sequence[float]]]) -> dict[K, list[float]]:
    """The seconds of every turn on the rank that took longest in it, from those of each rank."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def run(race: Race, turns: int, steps: int, warmup: int, say: Say) -> list[Row]:
    """Let the contenders of a race take turns, and compare them.

    Args:
        turns, steps, warmup: as of `take_turns`.

    Raises:
        Failed: a contender broke.
        Disagreement: their losses differ.
    """
    contenders = (*race.ours, *race.references, *race.also, *race.bounds)
    laps = take_turns(contenders, turns, steps, warmup, lambda what: say(f"{race.name}: {what}"))
    if race.tolerance is not None:
        check_agreement([lap for lap in laps if lap.contender not in race.bounds], race.tolerance)
    return rows(race, laps)


def take_turns(contenders: Sequence[Contender], turns: int, steps: int, warmup: int, say: Say) -> list[Lap]:
    """Let contenders train in turn, each in processes of its own.

    Args:
        turns: of each contender.
        steps: in a turn.
        warmup: steps of each contender before, which are not timed.

    Raises:
        Failed: a contender broke.
    """
    laps = [Lap(contender) for contender in contenders]
    with ExitStack() as stack:
        say(f"starting {len(laps)} contenders")
        processes = [stack.enter_context(ContenderProcesses(contender)) for contender in contenders]
        for process in processes:
            process.run(warmup)
        for turn in range(turns):
            say(f"turn {turn + 1} of {turns}")
            for process, lap in zip(processes, laps, strict=True):
                lap.turns.append(process.run(steps))
    return laps


def check_agreement(laps: list[Lap], tolerance: float) -> None:
    """Refuse contenders whose losses differ in one of their first `COMPARED` timed steps.

    Raises:
        Disagreement: naming the step and both losses.
    """
    first, *others = laps
    for other in others:
        for step, (ours, theirs) in enumerate(zip(first.losses[:COMPARED], other.losses[:COMPARED], strict=True)):
            if not math.isclose(ours, theirs, rel_tol=tolerance):
                raise Disagreement(
                    f"timed step {step}: {first.contender.name} has the loss {ours:.6f}, "
                    f"{other.contender.name} {theirs:.6f}: they do not do the same work"
                )


def rows(race: Race, laps: list[Lap]) -> list[Row]:
    """Compare everyone with the fastest reference.

    Returns:
        For each contender the median seconds of a step, on the clock and over all threads and ranks; the ratio of its
        speed to the best reference's (for the share of a peak, FLOP/s over the peak's), with the first and third
        quartile over the turns ("spread_low", "spread_high"); what the ratio must reach, None for a contender that must
        reach nothing; and the peak bytes of its largest process.
    """
    best = min((lap for lap in laps if lap.contender in race.references), key=lambda lap: lap.median)
    judged = [lap for lap in laps if lap.contender in race.ours]
    if race.fastest:
        judged = [min(judged, key=lambda lap: lap.median)]
    found: list[Row] = []
    for lap in laps:
        ratio, target = lap.rate() / best.rate(), race.target if lap in judged else None
        low, high = quartiles([lap.rate(turn) / best.rate(turn) for turn in range(len(lap.turns))])
        found.append({
            "race": race.name, "contender": lap.contender.name, "seconds": lap.median,
            "cpu_seconds": median(second for turn in lap.turns for second in turn.cpu_seconds),
            "tokens_per_second": lap.contender.workload.tokens / lap.median, "ratio": ratio, "spread_low": low,
            "spread_high": high, "target": target, "memory": max(turn.memory for turn in lap.turns),
            "met": None if target is None else ratio >= target,
        })
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
