"""The ways in which replicas share out their state, all at once: bounds of what each costs in time and memory.

Closed forms in arrays with one entry for each of `shoal.planning.search.space.shardings`. None is above what
`StagePrices` says of the same layout (`stage_of`, `finish_of`, `memory_of`): padding is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.planning.cost.memory.optimizer_state import least
from shoal.planning.cost.memory.stage import Alive
from shoal.planning.cost.memory.working_set import Half
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.communication import CommunicationGroup
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.search.space import Fields


class _Group(NamedTuple):
    """Ranks that share out parameters, or that have the same ones, of each way; their collectives are linear in their
    size. [ways, 1] each.

    Attributes:
        ranks: their number.
        steps, tree: seconds of any message of an all-gather, and of an all-reduce.
        per_byte: seconds for each byte of an all-gather; of an all-reduce two of that.
    """

    ranks: np.ndarray
    steps: np.ndarray
    tree: np.ndarray
    per_byte: np.ndarray

    @staticmethod
    def of(rings: Sequence[CommunicationGroup]) -> _Group:
        """Of each way's ring."""
        ranks, empty, whole, tree = np.array([
            (ring.ranks, ring.all_gather(0.0), ring.all_gather(1e12), ring.all_reduce(0.0)) for ring in rings
        ]).T[:, :, None]  # fmt: skip
        return _Group(ranks, empty, tree, (whole - empty) / 1e12)

    def gather(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of all-gathers or reduce-scatters of so many bytes altogether, in so many messages."""
        return count * self.steps + size * self.per_byte

    def reduce(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of all-reduces."""
        return count * self.tree + 2 * size * self.per_byte


class _Counted(NamedTuple):
    """Of some stages, what does not depend on the ways. [stages] each.

    Attributes:
        elements: parameters of a stage.
        units, buckets: messages in which they travel, unit by unit (ZeRO-3), or as they fill buckets.
    """

    elements: np.ndarray
    units: np.ndarray
    buckets: np.ndarray


class ReplicaChoices:
    """The ways of some degrees.

    Args:
        ways: as `shardings` has them.
        stages: of each, with any micro-batch.
    """

    def __init__(self, ways: Sequence[Fields], stages: Sequence[StagePrices]):
        self.ways, self.run = ways, stages[0].run
        self.zero = np.array([[way["zero"]] for way in ways])  # [ways, 1]
        self.groups = [self._groups(stages, "shard", "replicate")]
        if self.run.shape.experts:
            self.groups.append(self._groups(stages, "edp_shard", "edp_replicate"))
        self.held: dict[tuple, np.ndarray] = {}
        self.counts: dict[tuple, list[tuple[int, int, int]]] = {}
        reshard = np.array([[way.get("reshard_after_forward", True)] for way in ways])
        self.gathers = np.where(self.zero == 3, 1 + reshard, 0)  # in a forward and a backward

    @staticmethod
    def _groups(stages: Sequence[StagePrices], shard: str, replicate: str) -> tuple[_Group, _Group]:
        """Those that share out each parameter, and those that have the same share."""
        return _Group.of([one.group(shard) for one in stages]), _Group.of([one.group(replicate) for one in stages])

    def _counted(self, plain: StagePrices, parts: Sequence[StagePart]) -> list[_Counted]:
        """Experts apart, where there are some."""
        each = []
        for part in parts:
            key = (plain.run.layout.sequence_parallel, *_kind(plain, part))
            if key not in self.counts:
                of = plain.elements_of(part), plain.messages_of(part, 3), plain.messages_of(part, 0)
                self.counts[key] = list(zip(*of, strict=True))[: len(self.groups)]
            each.append(self.counts[key])
        return [_Counted(*np.array(group).T) for group in zip(*each, strict=True)]

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        policy, rule = self.run.policy, self.run.optimizer
        return (
            policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize,
            least(rule, policy.state.itemsize),
        )  # fmt: skip

    def reserved(self, plain: StagePrices, parts: Sequence[StagePart], alive: float) -> np.ndarray:
        """[ways] bytes that a rank needs at least, with so many alive in activations."""
        return self._resting(plain, parts) + plain.unused + plain.with_holes(alive)

    def at_worst(self, plain: StagePrices, parts: Sequence[StagePart], alive: Sequence[Alive]) -> np.ndarray:
        """[ways] bytes that a rank needs at least, by what is alive as each of its passes begins.

        Args:
            alive: as `StagePrices.memory_of` has it.
        """
        worst = 0.0
        for part, there in zip(parts, alive, strict=True):
            of_kind: dict[Half, float] = {}
            for (kind, *_), most in there.items():
                of_kind[kind] = max(most, of_kind.get(kind, most))
            worst = max([worst, *(most + plain.most(part, kind) for kind, most in of_kind.items())])
        return self.reserved(plain, parts, worst)

    def _resting(self, plain: StagePrices, parts: Sequence[StagePart]) -> np.ndarray:
        """[ways] bytes that a rank holds between steps at least."""
        key = (plain.run.layout.sequence_parallel, *(_kind(plain, part) for part in parts))
        if key not in self.held:
            storage, compute, reduce, moments = self._sizes
            found = np.zeros(self.zero.shape)
            every = np.sum([plain.elements_of(part) for part in parts], axis=0)[: len(self.groups)]
            for elements, (cut, _) in zip(every, self.groups, strict=True):
                here = elements / cut.ranks
                masters = here * storage if storage != compute else 0.0
                found += np.where(self.zero < 3, elements * compute + masters, here * storage)
                found += np.where(self.zero < 2, elements, here) * reduce + here * moments
            self.held[key] = found[:, 0]
        return self.held[key]

    def adding(self, plain: StagePrices, parts: Sequence[StagePart], seconds: np.ndarray) -> np.ndarray:
        """[4, ways, stages] seconds at least: what ZeRO-2 and 3 add to a micro-batch's passes; and a stage's reduction,
        update and gather behind its last backward.

        Args:
            parts: the stages.
            seconds: [3, stages] of a forward and of both halves of a backward, without that.
        """
        _, compute, reduce, _ = self._sizes
        counted, none = self._counted(plain, parts), np.zeros((len(self.ways), len(parts)))
        gathered, reduced, reductions, updated, gathers = (none.copy() for _ in range(5))
        for (elements, units, buckets), (cut, over) in zip(counted, self.groups, strict=True):
            messages, sharded = np.where(self.zero == 3, units, buckets), cut.ranks > 1
            gather = sharded * cut.gather(elements * compute, messages)
            reduction = sharded * cut.gather(elements * reduce, messages)
            gathered += gather
            reduced += (self.zero >= 2) * reduction
            updated += elements / cut.ranks
            reductions += (self.zero == 1) * reduction
            reductions += (over.ranks > 1) * over.reduce(elements * reduce / cut.ranks, messages)
            gathers += ((self.zero > 0) & (self.zero < 3)) * gather
        passes = self._passes(plain, gathered, reduced, seconds[0])
        every = np.sum([of.elements for of in counted], axis=0)
        reductions = self._left(plain, reductions, every, seconds[1] + seconds[2])
        return np.stack([passes, reductions, self._updating(plain, updated), gathers])

    def _passes(self, plain: StagePrices, gather: np.ndarray, reduction: np.ndarray, hides: np.ndarray) -> np.ndarray:
        """[ways, stages] what is left of a micro-batch's gathers and reductions.

        Args:
            hides: [stages] seconds of a forward, which is longer than what hides them.
        """
        forward = np.where(self.gathers > 0, gather, 0.0)
        backward = np.where(self.gathers > 1, gather, 0.0) + (reduction if plain.run.layout.overlap else 0.0)
        waiting = np.maximum(0.0, plain.slower * forward - hides) + np.maximum(0.0, plain.slower * backward - 2 * hides)
        return waiting + plain.slower * plain.constants["contention"] * (forward + backward)

    def _left(
        self, plain: StagePrices, reduction: np.ndarray, elements: np.ndarray, backward: np.ndarray
    ) -> np.ndarray:
        """[ways, stages] what is left of the last reductions behind the last backward.

        Args:
            elements, backward: [stages] parameters, and seconds of a backward.
        """
        layout, (*_, reduce, _) = plain.run.layout, self._sizes
        bucket = np.minimum(1.0, layout.bucket_bytes / np.maximum(1, elements * reduce)) if layout.overlap else 1.0
        hidden = np.where(self.zero < 2, plain.constants["hide_data"] * backward, np.inf)
        reduction = plain.run.passes * reduction
        return np.maximum(reduction * bucket, reduction - hidden)

    def _updating(self, plain: StagePrices, updated: np.ndarray) -> np.ndarray:
        storage, _, reduce, moments = self._sizes
        touched = updated * (2 * moments + 2 * storage + 2 * reduce)
        return plain.constants["update_slow"] * touched / plain.hbm


def _kind(plain: StagePrices, part: StagePart) -> tuple:
    return len(part.layers), plain.sparse(part), part.first, part.last, part.shared
