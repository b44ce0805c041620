"""What a step cannot take less than, whatever its schedule does in between: what lets a search leave layouts out.

A rank cannot begin before its first micro-batch has come down to it, must do all that its stages ask for, and the last
gradient must still go up to the first stage. Each bound follows from the order of the passes of *one* micro-batch
alone, and so holds for every order of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from shoal.pipeline.program import FORWARDS, WEIGHTS, Op, Program
from shoal.pipeline.schedules import SCHEDULES

WHOLE = frozenset({"1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "naive"})
"""Schedules with whole backwards: a gradient goes up only when those of the weights are made as well."""


CHANGE = {op: (op in FORWARDS) - (op in WEIGHTS) for op in Op}
"""Of the micro-batches that are alive."""


class Order(NamedTuple):
    """All that bounds ask of a schedule.

    Attributes:
        whole: backwards are.
        limited: rank r of p keeps p - r micro-batches in flight, as 1F1B does.
    """

    whole: bool
    limited: bool

    @staticmethod
    def of(schedule: str) -> Order:
        """By the schedule's name."""
        return Order(schedule in WHOLE, schedule == "1f1b")


@lru_cache(maxsize=4096)
def first_rank(schedule: str, ranks: int, microbatches: int, virtual: int) -> np.ndarray:
    """What is alive on the first rank after each of its computations. [computations, its stages] micro-batches

    Without the other ranks' orders, where it can be written down so; else of one forward.
    """
    of = SCHEDULES[schedule]
    stages = [stage for stage, rank in enumerate(of.placement(ranks, virtual)) if rank == 0]
    if of.order is None:
        return np.eye(1, len(stages))
    ops, where, *_ = zip(*of.order(0, ranks, microbatches, virtual), strict=True)
    change = np.zeros((len(ops), len(stages)))
    places = np.minimum(np.searchsorted(stages, np.fromiter(where, int, len(ops))), len(stages) - 1)
    change[np.arange(len(ops)), places] = np.fromiter(map(CHANGE.get, ops), float, len(ops))
    return np.cumsum(change, axis=0)


@dataclass(frozen=True, eq=False)
class StageChain:
    """A program's stages and where they are.

    Attributes:
        program: its placement and copies; actions and micro-batches are not looked at.
    """

    program: Program

    @cached_property
    def holder(self) -> np.ndarray:
        """[stages] pipeline rank of each."""
        return np.array(self.program.stage_rank)

    @cached_property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return int(self.holder.max()) + 1

    def through(self, microbatches: np.ndarray) -> np.ndarray:
        """[layouts, stages] of each layout's micro-batches, those through each stage."""
        copies = self.program.model_copies
        ends = np.arange(copies + 1) * microbatches[:, None] // copies
        return np.repeat(np.diff(ends).astype(float), self.program.depth, axis=1)

    @cached_property
    def beside(self) -> np.ndarray:
        """[stages] whether the stage before is on the same rank: what passes between them is there once."""
        same = np.append(False, self.holder[1:] == self.holder[:-1])
        same[:: self.program.depth] = False
        return same

    @cached_property
    def hops(self) -> np.ndarray:
        """[stages] messages from the first stage of each one's copy."""
        far = 1.0 - self.beside
        far[:: self.program.depth] = 0
        return np.cumsum(far.reshape(self.program.model_copies, -1), axis=1).ravel()

    @cached_property
    def first_holders(self) -> np.ndarray:
        """Pipeline ranks that hold a first stage."""
        return self.holder[:: self.program.depth]

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Stages in the order of their ranks, and where each rank's begin."""
        order = np.argsort(self.holder, kind="stable")
        return order, np.searchsorted(self.holder[order], np.arange(self.ranks))

    def by_rank(self, values: np.ndarray) -> np.ndarray:
        """[..., ranks] the sum over each one's [..., stages]."""
        order, starts = self._sorted
        return np.add.reduceat(values[..., order], starts, axis=-1)

    def least_by_rank(self, values: np.ndarray) -> np.ndarray:
        """[..., ranks] the least of each one's [..., stages]."""
        order, starts = self._sorted
        return np.minimum.reduceat(values[..., order], starts, axis=-1)

    def ends(
        self, forward: np.ndarray, inputs: np.ndarray, weights: np.ndarray, hop: np.ndarray, microbatches: np.ndarray,
        order: Order,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Before when no rank, and no first stage, can have done its last computation, of any number of layouts.

        Args:
            forward, inputs, weights: [layouts, stages] seconds of a forward and of the halves of a backward.
            hop: [layouts] seconds from the end of a computation until its result is on the next rank.
            microbatches: [layouts] that flow through the pipeline.

        Returns:
            [layouts, ranks] for each rank; and [layouts] for the first to hold a first stage.
        """
        upward = inputs + weights if order.whole else inputs  # what the stage before waits for
        through = self.through(microbatches)
        between = hop[:, None] * self.hops
        begins = self.least_by_rank(self._before(forward) + between)
        left = self.least_by_rank(self._before(upward) + between)
        busy = begins + self.by_rank(through * (forward + inputs + weights))
        # After a rank's last gradient, it goes through all stages before; the first still makes its weights' gradients.
        waited = self.by_rank(through * (forward + upward))
        drained = (begins + waited + left).max(axis=1)
        if not order.whole:
            drained = drained + weights[:, :: self.program.depth].min(axis=1)
        if order.limited:
            drained = np.maximum(drained, self._in_flight(forward, upward, hop, begins, left, microbatches))
        return busy, np.maximum(drained, busy[:, self.first_holders].min(axis=1))

    def _before(self, values: np.ndarray) -> np.ndarray:
        """[layouts, stages] the sum over the stages before, of the same copy."""
        table = values.reshape(len(values), self.program.model_copies, -1)
        return (np.cumsum(table, axis=2) - table).reshape(values.shape)

    def _in_flight(
        self, forward: np.ndarray, backward: np.ndarray, hop: np.ndarray, begins: np.ndarray, left: np.ndarray,
        microbatches: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """1F1B keeps p - r micro-batches in flight on rank r: as many go through in each of their round trips."""
        most = np.arange(self.ranks, 0, -1)
        trip = np.cumsum((forward + backward)[:, ::-1], axis=1)[:, ::-1] + 2 * hop[:, None] * (most - 1)
        others = microbatches[:, None] - 1
        trips, rest = np.divmod(others, most)
        return (begins + (trips + 1) * trip + rest * backward + left).max(axis=1)
