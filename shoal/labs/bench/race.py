"""Races: contenders that do the same work in turn on the same cores, and what comes out of it.

Times on a shared machine drift by more than the differences of interest. So the contenders take turns, A B A B, a few
steps each, and what is compared are medians over many turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median, quantiles, stdev

from shoal.labs.bench.crew import Contender, ContenderProcesses, ContenderTurn

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


@dataclass(frozen=True)
class ContenderResult:
    """One contender's result.

    Attributes:
        seconds: of a step, median.
        cpu_seconds: of a step over all threads and ranks, median.
        tokens_per_second: from that median.
        ratio: speed as a multiple of the best reference's; for the share of a peak, FLOP/s over the peak's.
        spread: first and third quartile of that ratio over the turns.
        target: what ``ratio`` must reach; None for a contender that must reach nothing.
        memory: peak bytes of its largest process.
    """

    race: str
    contender: str
    seconds: float
    cpu_seconds: float
    tokens_per_second: float
    ratio: float
    spread: tuple[float, float]
    target: float | None
    memory: int = 0

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.ratio >= self.target


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


def run(race: Race, turns: int, steps: int, warmup: int, say: Callable[[str], None]) -> list[ContenderResult]:
    """Let the contenders of a race take turns.

    Args:
        turns: of each contender.
        steps: in a turn.
        warmup: steps of each contender before, untimed.
        say: told what is going on.

    Raises:
        Failed: a contender broke.
        Disagreement: their losses differ.
    """
    laps = [Lap(contender) for contender in (*race.ours, *race.references, *race.also, *race.bounds)]
    with ExitStack() as stack:
        say(f"{race.name}: starting {len(laps)} contenders")
        crews = [stack.enter_context(ContenderProcesses(lap.contender)) for lap in laps]
        for crew in crews:
            crew.run(warmup)
        for turn in range(turns):
            say(f"{race.name}: turn {turn + 1} of {turns}")
            for crew, lap in zip(crews, laps, strict=True):
                lap.turns.append(crew.run(steps))
    if race.tolerance is not None:
        check_agreement([lap for lap in laps if lap.contender not in race.bounds], race.tolerance)
    return rows(race, laps)


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


def rows(race: Race, laps: list[Lap]) -> list[ContenderResult]:
    """Everyone against the fastest reference."""
    best = min((lap for lap in laps if lap.contender in race.references), key=lambda lap: lap.median)
    judged = [lap for lap in laps if lap.contender in race.ours]
    if race.fastest:
        judged = [min(judged, key=lambda lap: lap.median)]
    return [
        ContenderResult(
            race.name,
            lap.contender.name,
            lap.median,
            median(second for turn in lap.turns for second in turn.cpu_seconds),
            lap.contender.workload.tokens / lap.median,
            lap.rate() / best.rate(),
            quartiles([lap.rate(turn) / best.rate(turn) for turn in range(len(lap.turns))]),
            race.target if lap in judged else None,
            max(turn.memory for turn in lap.turns),
        )
        for lap in laps
    ]


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def deviation(values: list[float]) -> float:
    """The standard deviation: 0 of a single value, not a number where one of several is not finite."""
    if len(values) < 2:
        return 0.0
    return stdev(values) if all(map(math.isfinite, values)) else math.nan
