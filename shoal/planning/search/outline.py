"""A pipeline without any order: where its stages are, what they hold, and what a step cannot take less than.

A rank cannot begin before its first micro-batch has come down to it, must do all that its stages ask for, and the last
gradient must still go up to the first stage. Each bound follows from the order of the passes of *one* micro-batch
alone, so it holds for every order of many; and it is found for any number of layouts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shoal.pipeline.program import FORWARDS, WEIGHTS, Op, Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.cost.memory.stage import TIMES, Alive, alive_at
from shoal.planning.cost.parameters import StagePart, stage_parts
from shoal.spec.catalog import ModelShape

WHOLE = frozenset({"1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "naive"})
"""Schedules with whole backwards: a gradient goes up only when those of the weights are made as well."""
CHANGE = {op: (op in FORWARDS) - (op in WEIGHTS) for op in Op}
"""Of the micro-batches that are alive."""
Alike = tuple[list[StagePart], list[Alive]]
"""Ranks that hold alike: their stages, and of each what is alive on one of them at most."""


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


class Ends(NamedTuple):
    """Before when no rank can have done its last computation.

    Attributes:
        ranks: [layouts, ranks] seconds, for each rank.
        step: [layouts] seconds, for all of them.
    """

    ranks: np.ndarray
    step: np.ndarray


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


class Outline:
    """The stages of a program; those that are alike are of one kind.

    Args:
        program: its placement and copies are read; its actions and micro-batches are not.

    Attributes:
        kinds: one stage of each kind.
        kind: [stages] the kind of each.
        counts: [kinds, 5] of each kind what `StagePrices.linear` has the times of.
        holder: [stages] the pipeline rank of each.
        alike: of ranks that hold alike, (the numbers of each one's stages, and what these keep).
    """

    def __init__(self, shape: ModelShape, program: Program):
        parts, kinds, alike = stage_parts(shape, program), dict[tuple, int](), dict[tuple, list[np.ndarray]]()
        keys = []
        for part in parts:
            sparse = sum(map(shape.sparse, part.layers)) if shape.experts else 0
            keys.append((len(part.layers) - sparse, sparse, part.first, part.last, 1))
        self.kind = np.array([kinds.setdefault(key, len(kinds)) for key in keys])
        self.kinds = [parts[keys.index(key)] for key in kinds]
        self.counts = np.array(list(kinds), float)
        self.holder, self.copies, self.depth = np.array(program.stage_rank), program.model_copies, program.depth
        self._by_rank = np.argsort(self.holder, kind="stable")
        self._starts = np.searchsorted(self.holder[self._by_rank], np.arange(program.ranks))
        for held in np.split(self._by_rank, self._starts[1:]):
            alike.setdefault(tuple(self.kind[held]), []).append(held)
        self.alike = [(same, [parts[stage] for stage in same[0]]) for same in alike.values()]
        same_rank = np.append(False, self.holder[1:] == self.holder[:-1])
        begins = np.arange(len(parts)) % self.depth == 0
        self.beside = same_rank & ~begins
        """[stages] whether the stage before is on the same rank: what passes between them is there once."""
        self.hops = np.cumsum((~same_rank & ~begins).reshape(self.copies, -1), axis=1).ravel()
        """[stages] messages from the first stage of each one's copy."""

    @property
    def first(self) -> list[StagePart]:
        """The stages of the first rank."""
        return self.alike[0][1]

    @property
    def first_holders(self) -> np.ndarray:
        """Pipeline ranks that hold a first stage."""
        return self.holder[:: self.depth]

    def each(self, price: Callable[[StagePart], Any]) -> np.ndarray:
        """[..., stages] what a function says of every stage: a number, or several."""
        return np.array([price(part) for part in self.kinds], float).T[..., self.kind]

    def sum_by_rank(self, values: np.ndarray) -> np.ndarray:
        """[..., ranks] the sum over each one's [..., stages]."""
        return np.add.reduceat(values[..., self._by_rank], self._starts, axis=-1)

    def least_by_rank(self, values: np.ndarray) -> np.ndarray:
        """[..., ranks] the least of each one's [..., stages]."""
        return np.minimum.reduceat(values[..., self._by_rank], self._starts, axis=-1)

    def through(self, microbatches: np.ndarray | int) -> np.ndarray:
        """[layouts, stages] of each layout's micro-batches, those through each stage."""
        ends = np.arange(self.copies + 1) * np.reshape(microbatches, (-1, 1)) // self.copies
        return np.repeat(np.diff(ends).astype(float), self.depth, axis=1)

    def alive(self, most: np.ndarray) -> list[Alike]:
        """Of all ranks, with what is [times, stages] alive."""
        there = np.flatnonzero(most.max(axis=1) >= 0)  # few of the times
        times, most = [TIMES[i] for i in there], most[there]
        found = [(parts, most[:, np.array(same)].max(axis=1).T.tolist()) for same, parts in self.alike]
        return [(parts, [alive_at(stage, times) for stage in of_stages]) for parts, of_stages in found]

    # ---- bounds of time ------------------------------------------------------------------------------------------

    def bounds(self, linear: np.ndarray, hops: np.ndarray, microbatches: np.ndarray, order: Order) -> np.ndarray:
        """[layouts] seconds that a step takes at least, by what its stages take without ZeRO's gathers.

        Args:
            linear: [layouts, 4, 5], as `StagePrices.linear`.
            hops: [layouts] seconds of a message.
            microbatches: [layouts] of each replica.
        """
        *passes, launches = (linear @ self.counts.T)[:, :, self.kind].swapaxes(0, 1)
        ends = self.ends(np.stack(passes), hops, microbatches, order)
        launched = self.sum_by_rank(self.through(microbatches) * launches)
        return np.maximum(np.maximum(ends.ranks, launched).max(axis=1), ends.step)

    def ends(self, times: np.ndarray, hop: np.ndarray | float, microbatches: np.ndarray | int, order: Order) -> Ends:
        """Before when no rank, and no first stage, can have done its last computation.

        Args:
            times: [3, layouts, stages] seconds of a forward and of the halves of a backward.
            hop: [layouts] seconds from the end of a computation until its result is on the next rank, or one number.
            microbatches: [layouts] that flow through the pipeline, or one number.
        """
        forward, inputs, weights = times
        upward = inputs + weights if order.whole else inputs  # what the stage before waits for
        through, hop = self.through(microbatches), np.reshape(hop, (-1, 1))
        begins = self.least_by_rank(self._before(forward) + hop * self.hops)
        left = self.least_by_rank(self._before(upward) + hop * self.hops)
        busy = begins + self.sum_by_rank(through * (forward + inputs + weights))
        # After a rank's last gradient, it goes through all stages before; the first still makes its weights' gradients.
        drained = (begins + self.sum_by_rank(through * (forward + upward)) + left).max(axis=1)
        if not order.whole:
            drained = drained + weights[:, :: self.depth].min(axis=1)
        if order.limited:  # on rank r of p, p - r micro-batches in flight: as many go through in each round trip
            most = np.arange(len(self._starts), 0, -1)
            trip = np.cumsum((forward + upward)[:, ::-1], axis=1)[:, ::-1] + 2 * hop * (most - 1)
            trips, rest = np.divmod(np.reshape(microbatches, (-1, 1)) - 1, most)
            drained = np.maximum(drained, (begins + (trips + 1) * trip + rest * upward + left).max(axis=1))
        return Ends(busy, np.maximum(drained, busy[:, self.first_holders].min(axis=1)))

    def _before(self, values: np.ndarray) -> np.ndarray:
        """[layouts, stages] the sum over the stages before, of the same copy."""
        table = values.reshape(len(values), self.copies, -1)
        return (np.cumsum(table, axis=2) - table).reshape(values.shape)

    def with_added(self, ends: Ends, added: np.ndarray, microbatches: int) -> np.ndarray:
        """[layouts] seconds that a step takes at least, with what ZeRO adds to it.

        Args:
            ends: of all the layouts, or of one for all of them; without what is added.
            added: [4, layouts, stages] seconds: for each micro-batch; and of a stage's reduction, update and gather.
        """
        passes, reduce, step, gather = self.sum_by_rank(added)
        after = reduce + step.max(axis=1, keepdims=True) + gather
        through = microbatches // self.copies  # of the first stage
        busy = (ends.ranks + through * passes + after).max(axis=1)
        return np.maximum(busy, ends.step + after[:, self.first_holders].min(axis=1))
