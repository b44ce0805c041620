"""Placement of stages on ranks: in a loop, or in a V; and what schedules written rank by rank have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shoal.pipeline.program import Action, Op, Schedule

Order = Callable[[int, int, int, int], list[Action]]  # of (rank, ranks, micro-batches, stages per rank)


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages go round the ranks, one each for ``virtual`` = 1 (Narayanan et al. 2021, figure 4)."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_placement(ranks: int, virtual: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and up again: the first rank has the first and the last (Qi et al. 2024, 6).

    Also two copies of the model, one down the ranks and one up (DeepSeek-AI 2024, figure 5).
    """
    return (*range(ranks), *reversed(range(ranks)))


def per_rank_schedule(
    name: str, source: str, order: Order, placement: Callable[[int, int], tuple[int, ...]], **more: Any
) -> Schedule:
    """Build a schedule from a function that writes one rank's order without the others'."""

    def orders(ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
        return [order(rank, ranks, microbatches, virtual) for rank in range(ranks)]

    return Schedule(name, source, orders, placement, order=order, **more)


class MicroBatchCursor:
    """The passes of one stage: each kind is handed out in the order of the micro-batches.

    A schedule is written for a full pipeline. Past the last micro-batch there is nothing to hand out, so with fewer
    micro-batches the same lines give the same order with gaps: leaving out whole micro-batches breaks no dependency.
    """

    def __init__(self, stage: int, microbatches: int | Iterable[int]):
        self.stage = stage
        self.microbatches = range(microbatches) if isinstance(microbatches, int) else tuple(microbatches)
        self.given = dict.fromkeys(("F", "B", "I", "W"), 0)

    def __call__(self, kinds: str) -> list[Action]:
        """The next pass of each kind: ``stage("FIW")``. A B counts as an I and a W."""
        actions = []
        for kind in kinds:
            turn = self.given["I" if kind == "B" else kind]
            for counted in "IW" if kind == "B" else kind:
                self.given[counted] = turn + 1
            if turn < len(self.microbatches):
                actions.append(Action(Op(kind), self.stage, self.microbatches[turn]))
        return actions
