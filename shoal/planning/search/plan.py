"""Result of a search: layouts with their cost, the fastest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.stage import PeakMemory
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import LEVELS
from shoal.spec.layout import Layout

FAMILY = (
    "dp", "tp", "cp", "ulysses", "ep", "etp", "pp", "schedule", "virtual_stages", "micro_batch", "recompute",
)  # fmt: skip
Progressing = Callable[[int, int, "Plan"], None]


class PricedLayout(NamedTuple):
    """A layout with its estimated cost.

    Attributes:
        seconds: step time.
        layout: the complete layout.
        memory: memory of the fullest rank.
    """

    seconds: float
    layout: Layout
    memory: PeakMemory


@dataclass
class Plan:
    """Result of a search.

    Attributes:
        run: the run that was searched for, without a layout.
        best: the fastest layout that fits of each mesh, pipeline, micro-batch and recomputation, fastest first.
        players: players of programs, by pipeline ranks, micro-batches, schedule and stages on each rank.
        known: cached counts of their stages, see `StagePrices`.
        played: number of simulated layouts.
        branches, pruned: number of branches, and how many of them were excluded by their time.
        seconds: duration of the search.
    """

    run: EstimatedRun
    best: list[PricedLayout] = field(default_factory=list)
    players: dict[tuple, Player] = field(default_factory=dict)
    known: dict = field(default_factory=dict)
    played: int = 0
    branches: int = 0
    pruned: int = 0
    seconds: float = 0.0

    @property
    def found(self) -> PricedLayout:
        return self.best[0]


def family(layout: Layout) -> tuple:
    """Return the fields that distinguish layouts of a list; in all others each layout is the best of its kind."""
    return tuple(getattr(layout, name) for name in FAMILY)


def order(found: PricedLayout) -> tuple:
    """Sort key: by time, then memory, then name."""
    names = tuple(str(getattr(found.layout, name)) for name in LEVELS)
    return (float(f"{found.seconds:.9g}"), float(f"{found.memory.reserved:.9g}"), names)
