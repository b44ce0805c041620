"""Lower bounds of time and memory for all ways to shard state over replicas, computed together.

Closed forms in arrays with one entry per sharding of `shoal.planning.search.space.shardings`. No entry exceeds the
result of `StagePrices` for the same layout (`stage_times`, `finish_times`, `peak_memory`), because padding is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.planning.cost.memory.optimizer_state import least
from shoal.planning.cost.memory.stage import Alive
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.communication import CommunicationGroup
from shoal.planning.cost.time.stage import StagePrices, exposed_reduction, exposed_sharding
from shoal.planning.search.kinds import shard_complexity
from shoal.planning.search.space import Fields


class ReplicaChoices:
    """The shardings available for some degrees (`shardings`), with the stages of each for any micro-batch."""

    def __init__(self, ways: Sequence[Fields], stages: Sequence[StagePrices]):
        self.ways, run = ways, stages[0].run
        self.complexity = np.array([shard_complexity(way, run.layout.pp) for way in ways])
        self.zero = np.array([[way["zero"]] for way in ways])  # [ways, 1]
        self.reshard = np.array([[way.get("reshard_after_forward", True)] for way in ways])
        axes = [("shard", "replicate"), ("edp_shard", "edp_replicate")][: 2 if run.shape.experts else 1]
        self.groups = [
            [CommunicationGroup.stack([one.group(axis) for one in stages]) for axis in two] for two in axes
        ]
        self.storage, self.compute, self.reduce = (
            format.itemsize for format in (run.policy.storage, run.policy.compute, run.policy.reduce)
        )
        self.hidden = run.shape.hidden
        self.rows_without_id = max(0, run.shape.vocabulary_rows(run.layout.tp) - run.shape.vocab)
        self.moments = least(run.optimizer, run.policy.state.itemsize)
        self.held: dict[tuple, np.ndarray] = {}

    def reserved(self, plain: StagePrices, parts: Sequence[StagePart], alive: float, ranks: int = 1) -> np.ndarray:
        """Return lower bounds of a rank's bytes with ``alive`` bytes in activations. [ways]

        If ``parts`` are held by several ranks together, the bound is of the fullest rank.
        """
        return self._held(plain, parts) / ranks + plain.library_bytes + plain.with_holes(alive)

    def at_worst(self, plain: StagePrices, parts: Sequence[StagePart], alive: Sequence[Alive]) -> np.ndarray:
        """Return lower bounds of a rank's peak bytes, with ``alive`` as in `StagePrices.peak_memory`. [ways]"""
        each = [
            most + plain.peak_transient(part, when.kind)
            for part, live in zip(parts, alive, strict=True) for when, most in live.items()
        ]
        return self.reserved(plain, parts, max([0.0, *each]))

    def _held(self, plain: StagePrices, parts: Sequence[StagePart]) -> np.ndarray:
        """Return lower bounds of the bytes that a rank holds between steps. [ways]"""
        kinds = ((plain.kinds(part), part.first, part.last, part.shared) for part in parts)
        key = (plain.run.layout.sequence_parallel, *kinds)
        if key not in self.held:
            found = np.zeros(self.zero.shape)
            every = np.sum([plain.stage_elements(part) for part in parts], axis=0)
            for elements, (cut, _) in zip(every, self.groups, strict=False):
                local = elements / cut.ranks
                masters = local * self.storage if self.storage != self.compute else 0.0
                found += np.where(self.zero < 3, elements * self.compute + masters, local * self.storage)
                found += np.where(self.zero < 2, elements, local) * self.reduce
                found += np.maximum(local - sum(map(self._without_states, parts)), 0) * self.moments
            self.held[key] = found[:, 0]
        return self.held[key]

    def _without_states(self, part: StagePart) -> int:
        """Return the elements of rows without a token id, which may all lie in the shard that is counted."""
        return (part.first + part.last) * self.rows_without_id * self.hidden

    def adding(self, plain: StagePrices, parts: Sequence[StagePart], seconds: np.ndarray) -> np.ndarray:
        """Return lower bounds of ZeRO's additions to the time, in seconds. [4, ways, stages]

        The entries are the additions of ZeRO-2 and 3 to a micro-batch's passes; and a stage's reduction, update and
        gather after its last backward.

        Args:
            seconds: [3, stages] of a forward and of both halves of a backward, without these additions.
        """
        layout, slower = plain.run.layout, plain.slower * plain.run.passes
        every, units, filled = (
            np.array([price(part) for part in parts]).T
            for price in (plain.stage_elements, lambda part: plain.message_counts(part, 3),
                          lambda part: plain.message_counts(part, 0))
        )  # fmt: skip
        gathered, reduced, reductions, updated, gathers = np.zeros((5, len(self.ways), len(parts)))
        without = np.array([*map(self._without_states, parts)])
        for elements, of_units, buckets, (cut, over) in zip(every, units, filled, self.groups, strict=False):
            messages, sharded = np.where(self.zero == 3, of_units, buckets), cut.ranks > 1
            gather = sharded * cut.all_gather(elements * self.compute, messages)
            reduction = sharded * cut.reduce_scatter(elements * self.reduce, messages)
            gathered += (self.zero == 3) * gather
            reduced += (self.zero >= 2) * reduction
            updated += elements / cut.ranks
            reductions += (self.zero == 1) * reduction
            reductions += (over.ranks > 1) * over.all_reduce(elements * self.reduce / cut.ranks, messages)
            gathers += ((self.zero > 0) & (self.zero < 3)) * gather
        in_backward = gathered * self.reshard + (reduced if layout.overlap else 0.0)
        # Not all of a forward can hide communication; backwards are longer with ZeRO-2 and 3, and hide more.
        passes = sum(exposed_sharding(gathered, in_backward, seconds[0] / slower, plain.constants))
        hides = np.where(self.zero < 2, seconds[1] + seconds[2], 1e30)
        sizes = every[: len(self.groups)].sum(axis=0) * self.reduce
        reductions = exposed_reduction(plain.run.passes * reductions, sizes, hides, layout, plain.constants)
        touched = updated * (2 * self.storage + 2 * self.reduce) + np.maximum(updated - without, 0) * 2 * self.moments
        return np.stack([slower * passes, reductions, plain.constants["update_slow"] * touched / plain.hbm, gathers])
