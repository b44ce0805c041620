"""Placement of stages on ranks (looped or V-shaped), and helpers for schedules written one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shoal.pipeline.program import Action, Op, Schedule

Order = Callable[[int, int, int, int], list[Action]]  # of (rank, ranks, micro-batches, stages per rank)


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Place stages round-robin on the ranks; one per rank for ``virtual`` = 1 (Narayanan et al. 2021, figure 4)."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_placement(ranks: int, virtual: int) -> tuple[int, ...]:
    """Place two stages per rank, down the ranks and up again; rank 0 has the first and the last (Qi et al. 2024, 6).

    Also places two copies of the model, one down the ranks and one up (DeepSeek-AI 2024, figure 5).
    """
    return (*range(ranks), *reversed(range(ranks)))


def per_rank_schedule(
    name: str, source: str, order: Order, placement: Callable[[int, int], tuple[int, ...]], **more: Any
) -> Schedule:
    """Build a schedule from a function that returns one rank's order independently of the other ranks."""

    def orders(ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
        return [order(rank, ranks, microbatches, virtual) for rank in range(ranks)]

    return Schedule(name, source, orders, placement, order=order, **more)


class MicroBatchCursor:
    """Cursor over the passes of one stage: returns each kind of pass in micro-batch order.

    A schedule is written for a full pipeline. After the last micro-batch the cursor returns no action, so the same code
    gives the same order with gaps for fewer micro-batches. Omitting complete micro-batches breaks no dependency.
    """

    def __init__(self, stage: int, microbatches: int | Iterable[int]):
        self.stage = stage
        self.microbatches = range(microbatches) if isinstance(microbatches, int) else tuple(microbatches)
        self.given = dict.fromkeys(("F", "B", "I", "W"), 0)

    def __call__(self, kinds: str) -> list[Action]:
        """Return the next pass of each kind: ``stage("FIW")``. A B counts as an I and a W."""
        actions = []
        for kind in kinds:
            turn = self.given["I" if kind == "B" else kind]
            for counted in "IW" if kind == "B" else kind:
                self.given[counted] = turn + 1
            if turn < len(self.microbatches):
                actions.append(Action(Op(kind), self.stage, self.microbatches[turn]))
        return actions
