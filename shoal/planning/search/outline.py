"""A pipeline without any order: where its stages are and what they hold, for any number of layouts at once, and of
micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.pipeline.program import Program
from shoal.planning.cost.memory.stage import TIMES, Alive, alive_at
from shoal.planning.cost.parameters import StagePart, stage_parts
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.search.bounds import Order, StageChain
from shoal.spec.catalog import ModelShape

Alike = tuple[list[StagePart], list[Alive]]
"""Ranks that hold alike: their stages, and of each what is alive on one of them at most."""


@dataclass(frozen=True, eq=False)
class Outline:
    """Stages that are alike are of one kind.

    Attributes:
        chain: the program's outline.
        kinds: one stage of each kind.
        counts: [kinds, 5] of each kind what `StagePrices.linear` has the times of.
        kind: [stages] the kind of each.
        ranks: of ranks that hold alike, (the numbers of each one's stages, and what these keep).
    """

    chain: StageChain
    kinds: list[StagePart]
    counts: np.ndarray
    kind: np.ndarray
    ranks: list[tuple[list[list[int]], list[StagePart]]]

    @staticmethod
    def of(shape: ModelShape, program: Program) -> Outline:
        """Of a program."""
        parts = stage_parts(shape, program)
        kinds: dict[tuple, int] = {}
        sparse = [sum(shape.sparse(layer) for layer in part.layers) if shape.experts else 0 for part in parts]
        alike = [(len(p.layers), experts, p.first, p.last) for p, experts in zip(parts, sparse, strict=True)]
        kind = np.array([kinds.setdefault(key, len(kinds)) for key in alike])
        counts = np.array([(layers - experts, experts, first, last, 1) for layers, experts, first, last in kinds])
        ranks: dict[tuple, list[list[int]]] = {}
        held: dict[int, list[int]] = {}
        for stage, rank in enumerate(program.stage_rank):
            held.setdefault(rank, []).append(stage)
        for rank in range(program.ranks):
            ranks.setdefault(tuple(kind[held[rank]]), []).append(held[rank])
        alike_ranks = [(same, [parts[stage] for stage in same[0]]) for same in ranks.values()]
        one_each = [parts[int(np.argmax(kind == k))] for k in kinds.values()]
        return Outline(StageChain(program), one_each, counts.astype(float), kind, alike_ranks)

    @property
    def first(self) -> list[StagePart]:
        """The stages of the first rank."""
        return self.ranks[0][1]

    def times(self, stages: StagePrices) -> np.ndarray:
        """[3, stages] seconds of forwards and of both halves of backwards."""
        priced = [stages.stage_of(part) for part in self.kinds]
        return np.array([s.passes for s in priced]).T[:, self.kind]

    def finishing(self, stages: StagePrices) -> np.ndarray:
        """[3, kinds] seconds: reduction, update, gather."""
        return np.array([stages.finish_of(part) for part in self.kinds]).T

    def kept(self, stages: StagePrices) -> np.ndarray:
        """[stages] bytes that a micro-batch keeps alive."""
        return np.array([stages.kept_of(part) for part in self.kinds], float)[self.kind]

    def between(self, stages: StagePrices) -> np.ndarray:
        """[stages] bytes that are there between the halves of a micro-batch's backward."""
        return np.array([stages.between_of(part) for part in self.kinds], float)[self.kind]

    def bounds(self, linear: np.ndarray, hops: np.ndarray, microbatches: np.ndarray, order: Order) -> np.ndarray:
        """[layouts] seconds that a step takes at least, by what its stages take without ZeRO's gathers.

        Args:
            linear: [layouts, 4, 5], as `StagePrices.linear`.
            hops: [layouts] seconds of a message.
            microbatches: [layouts] of each replica.
        """
        times = (linear @ self.counts.T)[:, :, self.kind]
        busy, firsts = self.chain.ends(times[:, 0], times[:, 1], times[:, 2], hops, microbatches, order)
        launched = self.chain.by_rank(self.chain.through(microbatches) * times[:, 3])
        return np.maximum(np.maximum(busy, launched).max(axis=1), firsts)

    def launched(self, stages: StagePrices, finishing: np.ndarray, microbatches: int) -> float:
        """Seconds that the slowest host needs for a step at least.

        Args:
            finishing: [3, kinds] of `finishing`.
        """
        each = np.array([stages.stage_of(part).launched for part in self.kinds])[self.kind]
        through = self.chain.through(np.array([microbatches]))[0]
        return float(self.chain.by_rank(through * each + finishing.sum(axis=0)[self.kind]).max())

    @cached_property
    def _held(self) -> np.ndarray:
        """[kinds, ranks] how many stages of a kind a rank holds."""
        found = np.zeros((len(self.kinds), self.chain.ranks))
        np.add.at(found, (self.kind, self.chain.holder), 1)
        return found

    def ends(self, times: np.ndarray, hop: float, microbatches: int, order: Order) -> tuple[np.ndarray, np.ndarray]:
        """`StageChain.ends` of layouts that send and split the batch alike, of [3, layouts, stages] seconds of
        stages."""
        layouts, (forward, inputs, weights) = times.shape[1], times
        return self.chain.ends(
            forward, inputs, weights, np.full(layouts, hop), np.full(layouts, microbatches), order
        )

    def added(self, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[layouts, ranks] seconds for each micro-batch, and behind the last.

        Args:
            each: [4, layouts, kinds] of one stage: for each micro-batch, and of its reduction, update and gather.
        """
        passes, reduce, step, gather = each @ self._held
        return passes, reduce + step.max(axis=1, keepdims=True) + gather

    def least(
        self, ends: tuple[np.ndarray, np.ndarray], added: tuple[np.ndarray, np.ndarray], microbatches: int
    ) -> np.ndarray:
        """[layouts] seconds that a step takes at least, with what ZeRO adds to it.

        Args:
            ends: of `ends`, of all the layouts or of one for all of them.
            added: of `added`, all that is not in the ends.
        """
        passes, after = added
        through = microbatches // self.chain.program.model_copies  # of the first stage
        busy = (ends[0] + through * passes + after).max(axis=1)
        return np.maximum(busy, ends[1] + after[:, self.chain.first_holders].min(axis=1))

    def longest(self, updates: np.ndarray) -> float:
        """The most seconds that the updates of a rank's stages take, of [stages]."""
        return float(self.chain.by_rank(updates).max())

    def alike(self, alive: np.ndarray) -> list[Alike]:
        """Of all ranks, with what is [times, stages] alive."""
        there = np.flatnonzero(alive.max(axis=1) >= 0)  # few of the times
        times, alive = [TIMES[i] for i in there], alive[there]
        most = [(held, alive[:, np.array(same)].max(axis=1).T.tolist()) for same, held in self.ranks]
        return [(held, [alive_at(stage, times) for stage in of_stages]) for held, of_stages in most]
