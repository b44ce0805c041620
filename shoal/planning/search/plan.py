"""Result of a search: layouts with their cost, the fastest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.base.units import show_bytes, show_seconds
from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.stage import PeakMemory
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import LEVELS
from shoal.spec.layout import Layout

Progressing = Callable[[int, int, "Plan"], None]


class PricedLayout(NamedTuple):
    """A layout with its estimated cost.

    Attributes:
        seconds: step time.
        layout: the complete layout.
        memory: memory of the fullest rank.
        role: why it is listed: recommended, fastest, more memory free, simpler, usual.
    """

    seconds: float
    layout: Layout
    memory: PeakMemory
    role: str = ""


@dataclass(repr=False)
class Plan:
    """Result of a search.

    Attributes:
        run: the run that was searched for, without a layout.
        best: the recommended layout, then others; see `shoal.planning.search.kinds.Shelf.list`.
        nearby: faster plans of runs with another global batch, or on fewer devices (`shoal.planning.search.nearby`).
        usual: the usual layout for a model of this size (`shoal.planning.search.usual`), also if it does not fit.
        players: players of programs, by pipeline ranks, micro-batches, schedule and stages on each rank.
        known: cached counts of their stages, see `StagePrices`.
        played: number of simulated layouts.
        branches, pruned: number of branches, and how many of them were excluded by their time.
        seconds: duration of the search.
    """

    run: EstimatedRun
    best: list[PricedLayout] = field(default_factory=list)
    nearby: list[Plan] = field(default_factory=list)
    usual: PricedLayout | None = None
    players: dict[tuple, Player] = field(default_factory=dict)
    known: dict = field(default_factory=dict)
    played: int = 0
    branches: int = 0
    pruned: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        found = [
            f"\n  {show_seconds(each.seconds)} a step, {show_bytes(each.memory.reserved)}: {each.layout.describe()}"
            for each in self.listed if self.best
        ]
        return f"<Plan on {self.run.cluster.name}:{''.join(found) or ' nothing fits'}>"

    @property
    def listed(self) -> list[PricedLayout]:
        """The best layouts, and the usual one if it is none of them."""
        usual = self.usual
        beside = usual and all(found.layout != usual.layout for found in self.best)
        return [*self.best, usual] if usual and beside else self.best

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the fastest layout; 0 if none fits."""
        return max((self.run.tokens / found.seconds for found in self.best), default=0.0)

    @property
    def found(self) -> PricedLayout:
        return self.best[0]


def order(found: PricedLayout) -> tuple:
    """Sort key: by time, then memory, then name."""
    names = tuple(str(getattr(found.layout, name)) for name in LEVELS)
    return (float(f"{found.seconds:.9g}"), float(f"{found.memory.reserved:.9g}"), names)
