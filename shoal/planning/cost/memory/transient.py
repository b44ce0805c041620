"""Bytes of whole parameters and whole gradients that a backward has for a while, unit by unit (ZeRO-2 and 3).

A bucket has memory from the first gradient that is added to it until its sum over the ranks that shard it is there.
From the second micro-batch on that sum has memory of its own, as it is yet to be added to what was there. Where
reductions overlap, one is on its way while the next bucket is filled. Experts have buckets of their own, which a layer
completes before it comes to its other matrices, but for those of shared experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.planning.cost.buckets import Filled
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

WAITING, MAKING, COMPLETE, REST, ALL, SHARED = range(6)
"""Times of a unit's backward: before any of its gradients has memory, as the first ones are made, and as the buckets
that end with them are complete. In a layer with experts those are theirs, and there are three more: as the gradients of
its other matrices are made, and complete; and as those of shared experts are made, which come first of all."""


class Time(NamedTuple):
    """Bytes at one of these times.

    Attributes:
        parameters: gathered (ZeRO-3): of this unit and those ahead, where the pass before it on the stage was none or a
            backward; and where it was a forward, whose parameters may stay.
        gradients: in the first micro-batch of a step, in the second, and in a later one.
    """

    parameters: tuple[int, int]
    gradients: tuple[int, int, int]


NOTHING = (Time((0, 0), (0, 0, 0)),) * (SHARED + 1)


class LayerBackward(NamedTuple):
    """A layer's backward.

    Attributes:
        done: layers above it on the stage, whose backward is over.
        sparse: whether it has experts.
        times: see above.
    """

    done: int
    sparse: bool
    times: Sequence[Time]


class Passing(NamedTuple):
    """Of one stage.

    Attributes:
        head: its last unit.
        layers: of those with experts and of the others the last one, the first, and any in which more is whole than in
            those above.
        end: its first unit.
        carried: gradients of the backward before that are on their way when one begins, by micro-batch as in `Time`.
        stays: parameters that are gathered from a forward to the next backward of the stage: where forwards may follow
            each other, and where a backward always does.
    """

    head: Sequence[Time]
    layers: tuple[LayerBackward, ...]
    end: Sequence[Time]
    carried: tuple[int, int, int]
    stays: tuple[int, int]


def passing(
    shape: ModelShape, layout: Layout, part: StagePart, stage: Filled, wholes: Sequence[int], chunks: Sequence[int],
    compute: int, reduce: int,
) -> Passing:
    """What is whole at each time of a backward.

    Args:
        wholes: elements of each bucket, padding included.
        chunks: of this rank's shard of each.
        compute, reduce: bytes of a number of a parameter, and of a gradient.
    """
    units, carried, stays = len(stage.used), (0, 0, 0), (0, 0)
    times: Sequence[Sequence[Time]] = [NOTHING] * units
    if layout.zero >= 2:
        backward = _Backward(shape, layout, stage, wholes, chunks)
        alive = [backward.through(unit) for unit in reversed(range(units))][::-1]
        if (last := backward.on_its_way) is not None:
            carried = (0, wholes[last] * reduce, (wholes[last] + chunks[last]) * reduce)

        def time(there: Alive) -> Time:
            whole = sum([wholes[b] for b in there.whole]) * reduce
            second = whole + sum([chunks[b] for b in there.sums]) * reduce
            near, below = there.parameters
            _, on_its_way, with_sum = carried
            gradients = (whole, second + there.first * on_its_way, second + there.first * with_sum)
            return Time((near * compute, below * compute), gradients)

        times = [[time(there) for there in unit] for unit in alive]
        if layout.zero == 3:
            last = sum(wholes[b] for b in stage.used[-1]) * compute
            stays = (0, last) if layout.reshard_after_forward else (times[-1][WAITING].parameters[1],) * 2
    of_layers = times[part.first : part.first + len(part.layers)][::-1]
    sparse = map(shape.sparse, reversed(part.layers))
    turns = [LayerBackward(*turn) for turn in zip(range(units), sparse, of_layers, strict=False)]
    layers = tuple(turn for kind in (False, True) for turn in _that_count([t for t in turns if t.sparse == kind]))
    return Passing(times[-1], layers, times[0], carried, stays)


def _that_count(turns: Sequence[LayerBackward]) -> Iterable[LayerBackward]:
    """The first, the last, and any with more than those before."""
    most = -1
    for turn in turns:
        here = max(sum(time.gradients) for time in turn.times)
        if here > most or turn is turns[-1]:
            yield turn
        most = max(most, here)


class Alive(NamedTuple):
    """Buckets, by number.

    Attributes:
        parameters: elements of those that are gathered, as `Time` has them.
        whole: whose whole gradients have memory.
        sums: whose sums have memory of their own, from the second micro-batch on.
        first: none is complete in this backward yet, so that one of the backward before may be on its way.
    """

    parameters: tuple[int, int]
    whole: set[int]
    sums: set[int]
    first: bool


class _Backward:
    """Goes through a stage's units, the last one first.

    Attributes:
        on_its_way: a bucket that is complete, and not reduced yet.
    """

    def __init__(
        self, shape: ModelShape, layout: Layout, stage: Filled, wholes: Sequence[int], chunks: Sequence[int]
    ):
        self.layout, self.used, self.wholes, self.chunks = layout, stage.used, wholes, chunks
        self.shared = shape.experts is not None and shape.experts.shared > 0
        # A bias that is added behind a sum over tp has its gradient first of all.
        self.bias = self.shared and shape.family == "gpt" and layout.tp > 1
        self.experts = {b for b, kind in enumerate(stage.kind) if stage.sizes[kind].expert}
        self.tied = set(stage.used[-1]) - set(stage.of_unit[-1])  # the embedding, which is used from head to end
        self.ends = {b: unit for unit in reversed(range(len(stage.used))) for b in stage.used[unit]}
        before = min(set(stage.used[0]) - self.experts, default=0)  # what a backward completes last
        self.before = (wholes[before] + chunks[before]) * layout.overlap
        self.filling: set[int] = set()
        self.on_its_way: int | None = None
        self.first = True

    def through(self, unit: int) -> list[Alive]:
        """What is alive at the times of one."""
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
        # The output matrix before the norm; the embedding after positions.
        steps = [self._step(needed, [b], unit) for b in (used if unit else used[::-1])]
        making = steps[0 if unit else -1][0]
        return [*found, making, max((time for step in steps for time in step), key=self._elements)]

    def _gathered(self, unit: int, gone: set[int]) -> tuple[int, int]:
        """Elements of a unit's parameters but for some, and of those ahead, or of all that are below it."""
        if self.layout.zero < 3:
            return 0, 0
        ahead = max(0, unit - self.layout.prefetch)
        every = 0 if not self.layout.reshard_after_forward else ahead
        near, below = (self.tied.union(*self.used[begin : unit + 1]) - gone for begin in (ahead, every))
        return sum([self.wholes[b] for b in near]), sum([self.wholes[b] for b in below])

    def _elements(self, there: Alive) -> int:
        """Of all gradients, with those of the backward before."""
        whole, sums = sum([self.wholes[b] for b in there.whole]), sum([self.chunks[b] for b in there.sums])
        return whole + sums + self.before * there.first

    def _step(self, needed: tuple[int, int], buckets: Sequence[int], unit: int) -> list[Alive]:
        """Gradients of some buckets are made; then those that end here are reduced, one after the other."""
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
