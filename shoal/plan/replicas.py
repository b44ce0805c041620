"""The ways in which replicas share out their state, all at once: bounds of what each costs in time and memory.

Closed forms in arrays with one entry for each of `shoal.plan.space.shardings`. None is above what `Stages` says of the
same layout (`stage_of`, `finish_of`, `memory_of`): padding is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.cost.communication import Ring
from shoal.cost.moments import least
from shoal.cost.parameters import StagePart
from shoal.plan.memory import TIMES
from shoal.plan.space import Fields
from shoal.plan.stage import Stages


class _Rings(NamedTuple):
    """Collectives of one group for each way, linear in their size: seconds of any message, and for each byte of an
    all-gather; of an all-reduce two of that. [ways] each."""

    steps: np.ndarray
    tree: np.ndarray
    per_byte: np.ndarray

    @staticmethod
    def of(rings: Sequence[Ring]) -> _Rings:
        empty, whole = [ring.all_gather(0.0) for ring in rings], [ring.all_gather(1e12) for ring in rings]
        return _Rings(
            np.array(empty), np.array([ring.all_reduce(0.0) for ring in rings]),
            (np.array(whole) - empty) / 1e12,
        )  # fmt: skip

    def gather(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of all-gathers or reduce-scatters of so many bytes altogether, in so many messages."""
        return count * self.steps + size * self.per_byte

    def reduce(self, size: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Seconds of all-reduces."""
        return count * self.tree + 2 * size * self.per_byte


class Replicas:
    """The ways of some degrees.

    Args:
        ways: as `shardings` has them.
        stages: of each, with any micro-batch.
    """

    def __init__(self, ways: Sequence[Fields], stages: Sequence[Stages]):
        self.ways, self.run = ways, stages[0].run
        self.zero = np.array([way["zero"] for way in ways])
        self.groups = [self._groups(stages, "shard", "replicate")]
        if self.run.shape.experts:
            self.groups.append(self._groups(stages, "edp_shard", "edp_replicate"))
        self.held: dict[tuple, np.ndarray] = {}
        self.added: dict[tuple, np.ndarray] = {}
        reshard = np.array([way.get("reshard_after_forward", True) for way in ways])
        self.gathers = np.where(self.zero == 3, 1 + reshard, 0)  # in a forward and a backward

    @staticmethod
    def _groups(stages: Sequence[Stages], shard: str, replicate: str) -> tuple[np.ndarray, np.ndarray, _Rings, _Rings]:
        """Shards of each parameter, replicas of each shard, and what collectives of both take."""
        cut, copies = [one.group(shard) for one in stages], [one.group(replicate) for one in stages]
        ranks = (np.array([ring.ranks for ring in rings], float) for rings in (cut, copies))
        return *ranks, _Rings.of(cut), _Rings.of(copies)

    def _elements(self, plain: Stages, parts: Sequence[StagePart]) -> list[float]:
        """Parameters of a rank, experts apart."""
        state = plain.state_of(parts)
        return [state.elements - state.experts, state.experts][: len(self.groups)]

    def _messages(self, plain: Stages, part: StagePart) -> list[np.ndarray]:
        """[ways] collectives in which all of a stage's parameters travel, experts apart."""
        units, buckets = plain.messages_of(part, 3), plain.messages_of(part, 0)
        return [np.where(self.zero == 3, *counts) for counts in zip(units, buckets, strict=True)][: len(self.groups)]

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        policy, rule = self.run.policy, self.run.optimizer
        return (
            policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize,
            least(rule, policy.state.itemsize),
        )  # fmt: skip

    def reserved(self, plain: Stages, parts: Sequence[StagePart], alive: float) -> np.ndarray:
        """[ways] bytes that a rank needs at least, with so many alive in activations."""
        return self._resting(plain, parts) + plain.unused + (1 + plain.fragmentation) * alive

    def at_worst(self, plain: Stages, parts: Sequence[StagePart], alive: Sequence[Sequence[float]]) -> np.ndarray:
        """[ways] bytes that a rank needs at least, by what is alive as each of its passes begins.

        Args:
            alive: as `Stages.memory_of` has it.
        """
        worst = max(
            most + plain.most(part, kind)
            for part, there in zip(parts, alive, strict=True) for (kind, *_), most in zip(TIMES, there, strict=True)
            if most >= 0
        )  # fmt: skip
        return self._resting(plain, parts) + plain.unused + (1 + plain.fragmentation) * worst

    def _resting(self, plain: Stages, parts: Sequence[StagePart]) -> np.ndarray:
        """[ways] bytes that a rank holds between steps at least."""
        key = (plain.run.layout.sequence_parallel, *(_kind(plain, part) for part in parts))
        if key not in self.held:
            storage, compute, reduce, moments = self._sizes
            found = np.zeros(len(self.ways))
            for elements, (shards, *_) in zip(self._elements(plain, parts), self.groups, strict=True):
                here = elements / shards
                masters = here * storage if storage != compute else 0.0
                found += np.where(self.zero < 3, elements * compute + masters, here * storage)
                found += np.where(self.zero < 2, elements, here) * reduce + here * moments
            self.held[key] = found
        return self.held[key]

    def adding(self, plain: Stages, part: StagePart) -> np.ndarray:
        """[4, ways] seconds at least: what ZeRO-2 and 3 add to a micro-batch's passes; and a stage's reduction, update
        and gather behind its last backward."""
        layout = plain.run.layout
        key = (layout.micro_batch, layout.sequence_parallel, layout.recompute, *_kind(plain, part))
        if key not in self.added:
            self.added[key] = np.concatenate([self._passes(plain, part)[None], self._finishing(plain, part)])
        return self.added[key]

    def _passes(self, plain: Stages, part: StagePart) -> np.ndarray:
        _, compute, reduce, _ = self._sizes
        gather = reduction = np.zeros(len(self.ways))
        each = zip(self._elements(plain, [part]), self._messages(plain, part), self.groups, strict=True)
        for elements, messages, (shards, _, cut, _) in each:
            cut_at_all = (shards > 1) * (elements > 0)
            gather = gather + cut_at_all * cut.gather(elements * compute, messages)
            reduction = reduction + cut_at_all * (self.zero >= 2) * cut.gather(elements * reduce, messages)
        forward = np.where(self.gathers > 0, gather, 0.0)
        backward = np.where(self.gathers > 1, gather, 0.0) + (reduction if plain.run.layout.overlap else 0.0)
        hides = plain.stage_of(part).forward  # which is longer than what hides it
        waiting = np.maximum(0.0, plain.slower * forward - hides) + np.maximum(0.0, plain.slower * backward - 2 * hides)
        return waiting + plain.slower * plain.constants["contention"] * (forward + backward)

    def _finishing(self, plain: Stages, part: StagePart) -> np.ndarray:
        storage, compute, reduce, moments = self._sizes
        held = self._elements(plain, [part])
        reduction, updated, gather = np.zeros((3, len(self.ways)))
        each = zip(held, self._messages(plain, part), self.groups, strict=True)
        for elements, messages, (shards, copies, cut, over) in each:
            if not elements and shards is not self.groups[0][0]:
                continue
            here, size = elements / shards, elements * reduce
            updated += here
            reduction += np.where((shards > 1) & (self.zero == 1), cut.gather(size, messages), 0.0)
            reduction += np.where(copies > 1, over.reduce(size / shards, messages), 0.0)
            gathered = (shards > 1) & (self.zero > 0) & (self.zero < 3)
            gather += np.where(gathered, cut.gather(elements * compute, messages), 0.0)
        times = plain.stage_of(part)
        backward = times.backward_input + times.backward_weight
        layout = plain.run.layout
        bucket = min(1.0, layout.bucket_bytes / max(1, sum(held) * reduce)) if layout.overlap else 1.0
        hidden = np.where(self.zero < 2, plain.constants["hide_data"] * backward, np.inf)
        reduction = plain.run.passes * reduction
        reduction = np.maximum(reduction * bucket, reduction - hidden)
        touched = updated * (2 * moments + 2 * storage + 2 * reduce)
        return np.stack([reduction, plain.constants["update_slow"] * touched / plain.hbm, gather])


def _kind(plain: Stages, part: StagePart) -> tuple:
    return len(part.layers), plain.sparse(part), part.first, part.last, part.shared
