"""Transient bytes of unsharded parameters and gradients in a backward, unit by unit (ZeRO-2 and 3).

A bucket has memory from the first gradient that is added to it until its sum over the sharding ranks is available. From
the second micro-batch on, that sum has its own memory, because it is then added to the previous sum. With overlapped
reductions, one bucket is being reduced while the next is filled. Experts have their own buckets, which a layer
completes before it reaches its other matrices, except the buckets of shared experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.planning.cost.buckets import Filled, cut_buckets, fill_buckets, replica_layout
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout
from shoal.spec.number_formats import Formats

WAITING, MAKING, COMPLETE, REST, ALL, SHARED = range(6)
"""Times of a unit's backward: before any of its gradients has memory, when the first gradients are computed, and when
the buckets that end with them are complete. In an expert layer these refer to the experts' gradients, with three more
times: when the gradients of its other matrices are computed, when they are complete, and when the gradients of shared
experts are computed, which comes first."""


class Time(NamedTuple):
    """Bytes at one of these times."""

    # gathered parameters (ZeRO-3) of this unit and the prefetched ones, if the stage's previous pass was none or a
    # backward; and if it was a forward, whose parameters may stay
    parameters: tuple[int, int]
    gradients: tuple[int, int, int]  # in the first micro-batch of a step, in the second, and in a later one


NOTHING = (Time((0, 0), (0, 0, 0)),) * (SHARED + 1)


class LayerBackward(NamedTuple):
    """Unsharded bytes during a layer's backward."""

    done: int  # number of layers above it on the stage, whose backward is finished
    sparse: bool  # True if it has experts
    times: Sequence[Time]  # bytes at each of the times above


class UnshardedBytes(NamedTuple):
    """Unsharded bytes during the backward of one stage."""

    head: Sequence[Time]  # its last unit
    layers: tuple[LayerBackward, ...]  # the last one first
    end: Sequence[Time]  # its first unit
    # gradients of the previous backward still being reduced when one begins, by micro-batch as in `Time`
    carried: tuple[int, int, int]
    # parameters that stay gathered from a forward to the next backward of the stage: if forwards may follow each other,
    # and if a backward always follows
    stays: tuple[int, int]


def count_unsharded(shape: ModelShape, layout: Layout, policy: Formats, part: StagePart) -> UnshardedBytes:
    """Return the unsharded parameters (ZeRO-3) and gradients (ZeRO-2 and 3) at each time of a stage's backward."""
    layout, compute, reduce = replica_layout(layout), policy.compute.itemsize, policy.reduce.itemsize
    stage = fill_buckets(shape, layout, part, reduce, 0, 0, 0)
    chunks, full_sizes = cut_buckets(layout, stage)
    units, carried, stays = len(stage.used), (0, 0, 0), (0, 0)
    times: Sequence[Sequence[Time]] = [NOTHING] * units
    if layout.zero >= 2:
        backward = _Backward(shape, layout, stage, full_sizes, chunks)
        alive = [backward.through(unit) for unit in reversed(range(units))][::-1]
        if (last := backward.on_its_way) is not None:
            carried = (0, full_sizes[last] * reduce, (full_sizes[last] + chunks[last]) * reduce)

        def time(buckets: Alive) -> Time:
            full = sum([full_sizes[b] for b in buckets.full]) * reduce
            second = full + sum([chunks[b] for b in buckets.sums]) * reduce
            near, below = buckets.parameters
            _, on_its_way, with_sum = carried
            gradients = (full, second + buckets.first * on_its_way, second + buckets.first * with_sum)
            return Time((near * compute, below * compute), gradients)

        times = [[time(buckets) for buckets in unit] for unit in alive]
        if layout.zero == 3:
            last = sum(full_sizes[b] for b in stage.used[-1]) * compute
            stays = (0, last) if layout.reshard_after_forward else (times[-1][WAITING].parameters[1],) * 2
    of_layers = times[part.first : part.first + len(part.layers)][::-1]
    sparse = map(shape.sparse, reversed(part.layers))
    layers = tuple(LayerBackward(*turn) for turn in zip(range(units), sparse, of_layers, strict=False))
    return UnshardedBytes(times[-1], layers, times[0], carried, stays)


class Alive(NamedTuple):
    """Buckets in memory, by number."""

    parameters: tuple[int, int]  # elements of the gathered parameters, see `Time`
    full: set[int]  # buckets with memory for unsharded gradients
    sums: set[int]  # buckets whose sums have their own memory, from the second micro-batch on
    first: bool  # no bucket is complete in this backward yet, so one of the previous backward may still be reduced


class _Backward:
    """Visits a stage's units in backward order and tracks its buckets."""

    def __init__(
        self, shape: ModelShape, layout: Layout, stage: Filled, full_sizes: Sequence[int], chunks: Sequence[int]
    ):
        self.layout, self.used, self.full_sizes, self.chunks = layout, stage.used, full_sizes, chunks
        self.shared = shape.experts is not None and shape.experts.shared > 0
        # The gradient of a bias added after a sum over tp is the first of all.
        self.bias = self.shared and shape.family == "gpt" and layout.tp > 1
        self.experts = {b for b, size in enumerate(stage.sizes) if size.expert}
        self.tied = set(stage.used[-1]) - set(stage.of_unit[-1])  # the embedding, which is used from head to end
        self.ends = {b: unit for unit in reversed(range(len(stage.used))) for b in stage.used[unit]}
        before = min(set(stage.used[0]) - self.experts, default=0)  # completed last in a backward
        self.before = (full_sizes[before] + chunks[before]) * layout.overlap
        self.filling: set[int] = set()
        self.on_its_way: int | None = None  # a complete bucket whose reduction has not finished
        self.first = True

    def through(self, unit: int) -> list[Alive]:
        """Return the buckets in memory at the times of one unit."""
        used = sorted(self.used[unit])
        routed = self.experts.intersection(used)
        needed = self._gathered(unit, set())
        if routed:
            others = [b for b in used if b not in routed]
            waiting = self._now(needed)
            if self.shared:
                self.filling.update(others)
            shared = self._now(needed)
            found = [shared if self.bias else waiting, *self._step(needed, sorted(routed), unit)]
            return [*found, *self._step(self._gathered(unit, routed), others, unit), shared]
        found = [self._now(needed)]
        # The output matrix comes before the norm; the embedding comes after positions.
        steps = [self._step(needed, [b], unit) for b in (used if unit else used[::-1])]
        making = steps[0 if unit else -1][0]
        return [*found, making, max((time for step in steps for time in step), key=self._elements)]

    def _gathered(self, unit: int, gone: set[int]) -> tuple[int, int]:
        """Return the elements of a unit's parameters except ``gone``, with those prefetched, and with all below it."""
        if self.layout.zero < 3:
            return 0, 0
        ahead = max(0, unit - self.layout.prefetch)
        every = 0 if not self.layout.reshard_after_forward else ahead
        near, below = (self.tied.union(*self.used[begin : unit + 1]) - gone for begin in (ahead, every))
        return sum([self.full_sizes[b] for b in near]), sum([self.full_sizes[b] for b in below])

    def _elements(self, buckets: Alive) -> int:
        """Return the elements of all gradients, including the previous backward's."""
        full, sums = sum([self.full_sizes[b] for b in buckets.full]), sum([self.chunks[b] for b in buckets.sums])
        return full + sums + self.before * buckets.first

    def _step(self, needed: tuple[int, int], buckets: Sequence[int], unit: int) -> list[Alive]:
        """Compute gradients of some buckets, then reduce the ones that end here one after the other."""
        self.filling.update(buckets)
        complete = [b for b in reversed(buckets) if self.ends[b] == unit]
        found = [self._now(needed), self._now(needed, *complete[:1])]
        for b in complete:
            self.filling.discard(b)
            shards = self.layout.expert_shape[2] if b in self.experts else self.layout.shards
            self.on_its_way = b if self.layout.overlap and shards > 1 else None
            self.first = False
        return found

    def _now(self, needed: tuple[int, int], *complete: int) -> Alive:
        on_its_way = set() if self.on_its_way is None else {self.on_its_way}
        return Alive(needed, self.filling | on_its_way, {*complete, *on_its_way}, self.first)
