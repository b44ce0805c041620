"""Assignment of a stage's parameters to the buckets that are reduced, gathered and sharded together.

Many layouts have the same buckets, which are cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from shoal.planning.cost.parameters import SPLITTING, LocalParameter, StagePart, Unit, list_units
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

PLAIN = Layout()
ALIGN = 64  # elements: shards are rounded up to multiples of this (`shoal.engine.parallel.zero.bucket`)
Bucket = list[LocalParameter]


class Size(NamedTuple):
    """Properties that determine the bytes of a bucket."""

    # allocated, elements: total elements with and without padding
    allocated: int
    elements: int
    expert: bool  # True if its parameters are of experts; a bucket does not mix both

    @staticmethod
    def from_bucket(bucket: Bucket) -> Size:
        return Size(sum([h.allocated for h in bucket]), sum([h.box.numel for h in bucket]), bucket[0].expert)

    def chunk(self, shards: int) -> int:
        return -(-self.allocated // (shards * ALIGN)) * ALIGN


class Filled(NamedTuple):
    """The buckets of a stage, in the order in which the forward uses their parameters."""

    buckets: list[Bucket]
    sizes: list[Size]  # of each
    of_unit: list[tuple[int, ...]]  # for each unit, the numbers of the buckets of its own parameters
    used: list[tuple[int, ...]]  # for each unit, the buckets it needs: the model's end may need the embedding's bucket


def fill_buckets(shape: ModelShape, layout: Layout, part: StagePart, itemsize: int, *index: int) -> Filled:
    """Return a stage's buckets: one per unit with ZeRO-3, otherwise filled up to `Layout.bucket_bytes`.

    Args:
        itemsize: bytes per element in the buckets.
        index: the rank's indices along tp, ep and etp.
    """
    limit = 0.0 if layout.zero == 3 else layout.bucket_bytes
    return _filled(shape, tuple(getattr(layout, name) for name in SPLITTING), part, limit, itemsize, *index)


def count_elements(shape: ModelShape, layout: Layout, part: StagePart, *index: int) -> tuple[int, int]:
    """Return a stage's parameters on one rank, without padding: non-expert and expert parameters."""
    found = {False: 0, True: 0}
    for unit in _units(shape, tuple(getattr(layout, name) for name in SPLITTING), part, *index):
        for held in unit:
            found[held.expert] += held.box.numel
    return found[False], found[True]


def replica_layout(layout: Layout) -> Layout:
    """Return the layout by which state is sharded; with relaxed synchronisation, each replica is unsharded."""
    return layout if layout.sync == "all-reduce" else layout.model_copy(update={"zero": 0})


def cut_buckets(layout: Layout, stage: Filled) -> tuple[list[int], list[int]]:
    """Return the elements of a rank's shard of each bucket, and of each full bucket, padding included."""
    shards = [layout.expert_shape[2] if size.expert else layout.shards for size in stage.sizes]
    chunks = [size.chunk(count) for size, count in zip(stage.sizes, shards, strict=True)]
    return chunks, [count * chunk for count, chunk in zip(shards, chunks, strict=True)]


@lru_cache(maxsize=16384)
def _filled(
    shape: ModelShape, splitting: tuple, part: StagePart, limit: float, itemsize: int, *index: int
) -> Filled:
    """Return a stage's buckets of at least ``limit`` bytes, cached for all shard counts."""
    units = _units(shape, splitting, part, *index)
    found = list(_buckets(units, limit, itemsize))
    buckets = [bucket for bucket, _ in found]
    of_unit: list[tuple[int, ...]] = [()] * len(units)
    for i, (_, numbers) in enumerate(found):
        for unit in numbers:
            of_unit[unit] += (i,)
    used = list(of_unit)
    if shape.shares_ends and part.first and part.last:
        used[-1] = (*used[0], *(bucket for bucket in used[-1] if bucket not in used[0]))
    return Filled(buckets, [Size.from_bucket(bucket) for bucket in buckets], of_unit, used)


def _units(shape: ModelShape, splitting: tuple, part: StagePart, *index: int) -> list[Unit]:
    """Return the units of a stage; layers of one kind (expert or dense, all or some tokens) share one."""
    every = [(shape.sparse(i), shape.skips(i)) for i in range(shape.layers)]
    first = [every.index(every[i]) for i in part.layers]
    units = [_unit(shape, splitting, StagePart(range(i, i + 1), False, False), *index) for i in first]
    if part.first:
        units.insert(0, _unit(shape, splitting, StagePart(range(0), True, False, part.shared), *index))
    if part.last:
        units.append(_unit(shape, splitting, StagePart(range(0), False, True, part.shared), *index))
    return units


@lru_cache(maxsize=16384)
def _unit(shape: ModelShape, splitting: tuple, part: StagePart, *index: int) -> Unit:
    """Return a part's single unit, cached for all stages that contain it and all ZeRO stages."""
    layout = PLAIN.model_copy(update=dict(zip(SPLITTING, splitting, strict=True)))
    (unit,) = list_units(shape, layout, part, *index)
    return unit


def _buckets(units: Iterable[Unit], limit: float, itemsize: int) -> Iterator[tuple[Bucket, list[int]]]:
    """Yield buckets as filled by `shoal.engine.parallel.zero.zero_engine`, with the numbers of their units."""
    filling: dict[bool, tuple[Bucket, list[int]]] = {}
    filled: Counter[bool] = Counter()
    for number, unit in enumerate(units):
        yield from (([held], [number]) for held in unit if held.alone)
        for held in unit:
            if not held.alone:
                bucket, numbers = filling.setdefault(held.expert, ([], []))
                bucket.append(held)
                filled[held.expert] += held.allocated
                if number not in numbers[-1:]:
                    numbers.append(number)
        for kind in [kind for kind in filling if filled[kind] * itemsize >= limit]:
            filled[kind] = 0
            yield filling.pop(kind)
    yield from filling.values()
