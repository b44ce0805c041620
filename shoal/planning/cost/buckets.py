"""How a stage's parameters fill the buckets that are reduced, gathered and cut into shards together.

Many layers have buckets of the same size, and many layouts the same buckets: each kind is counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from shoal.planning.cost.parameters import SPLITTING, LocalParameter, StagePart, units_of
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

PLAIN = Layout()
ALIGN = 64  # elements: what shards are rounded up to (`shoal.engine.parallel.zero.bucket`)


class Members(NamedTuple):
    """Parameters of one unit that share a bucket, with their sums.

    Attributes:
        held: the parameters.
        allocated, elements: of all, with and without padding.
        expert: whether they are experts', all of them.
    """

    held: tuple[LocalParameter, ...]
    allocated: int
    elements: int
    expert: bool

    @staticmethod
    def of(held: Iterable[LocalParameter]) -> Members:
        """Summed."""
        held = tuple(held)
        return Members(held, sum(h.allocated for h in held), sum(h.box.numel for h in held), held[0].expert)


Bucket = list[Members]
Grouped = tuple[Bucket, Bucket]  # of a unit: what has a bucket by itself, and the rest


class Size(NamedTuple):
    """What decides the bytes of a bucket.

    Attributes:
        allocated, elements: of all parameters, with and without padding.
        expert: whether they are experts'.
    """

    allocated: int
    elements: int
    expert: bool

    @staticmethod
    def of(bucket: Bucket) -> Size:
        """Summed."""
        return Size(
            sum(members.allocated for members in bucket), sum(members.elements for members in bucket), bucket[0].expert
        )

    def chunk(self, shards: int) -> int:
        """Elements of one of so many shards."""
        return -(-self.allocated // (shards * ALIGN)) * ALIGN


class Filled(NamedTuple):
    """The buckets of a stage. Those of one size are of one kind.

    Attributes:
        buckets: in the order in which forward meets their parameters.
        kind: of each.
        sizes: of each kind.
        counts: buckets of each kind.
        of_unit: of each unit, the numbers of the buckets that its own parameters are in.
        used: of each unit, those that it needs: an output matrix that is the embedding needs that one's.
    """

    buckets: list[Bucket]
    kind: list[int]
    sizes: list[Size]
    counts: list[int]
    of_unit: list[tuple[int, ...]]
    used: list[tuple[int, ...]]


def buckets_of(shape: ModelShape, layout: Layout, part: StagePart, itemsize: int, *index: int) -> Filled:
    """A stage's buckets: ZeRO-3 gathers each unit by itself, and else they fill up to `Layout.bucket_bytes`.

    Args:
        itemsize: of what fills them.
        index: the rank's places along tp, ep and etp.
    """
    limit = 0.0 if layout.zero == 3 else layout.bucket_bytes
    return _filled(shape, tuple(getattr(layout, name) for name in SPLITTING), part, limit, itemsize, *index)


def elements_of(shape: ModelShape, layout: Layout, part: StagePart, *index: int) -> tuple[int, int]:
    """Parameters of a stage on one rank, padding and experts left out; and those of experts."""
    found = {False: 0, True: 0}
    for unit in _members(shape, tuple(getattr(layout, name) for name in SPLITTING), part, *index):
        for members in chain(*unit):
            found[members.expert] += members.elements
    return found[False], found[True]


@lru_cache(maxsize=16384)
def _filled(
    shape: ModelShape, splitting: tuple, part: StagePart, limit: float, itemsize: int, *index: int
) -> Filled:
    """A stage's buckets, counted once for all shards.

    Args:
        limit: the least bytes of a bucket.
        itemsize: of what fills them.
    """
    units = _members(shape, splitting, part, *index)
    found = list(_buckets(units, limit, itemsize))
    buckets = [bucket for bucket, _ in found]
    of_unit: list[tuple[int, ...]] = [()] * len(units)
    for i, (_, numbers) in enumerate(found):
        for unit in numbers:
            of_unit[unit] += (i,)
    used = list(of_unit)
    if shape.tied and part.first and part.last:
        used[-1] = (*used[0], *(bucket for bucket in used[-1] if bucket not in used[0]))
    kinds: dict[Size, int] = {}  # in the order in which they come
    kind = [kinds.setdefault(Size.of(bucket), len(kinds)) for bucket in buckets]
    return Filled(
        buckets, kind, list(kinds), [kind.count(k) for k in range(len(kinds))],
        of_unit, used,
    )  # fmt: skip


def _members(shape: ModelShape, splitting: tuple, part: StagePart, *index: int) -> list[Grouped]:
    """Of each unit, those that have a bucket by themselves, and the others."""
    kinds = [(shape.sparse(i), shape.skips(i)) for i in part.layers]
    alike = {kind: _layer(shape, splitting, kind, *index) for kind in set(kinds)}
    units = [alike[kind] for kind in kinds]
    if part.first:
        units.insert(0, _grouped(shape, splitting, StagePart(range(0), True, False, part.shared), *index))
    if part.last:
        units.append(_grouped(shape, splitting, StagePart(range(0), False, True, part.shared), *index))
    return units


def _layer(shape: ModelShape, splitting: tuple, kind: tuple[bool, bool], *index: int) -> Grouped:
    """Of any layer with experts or without, through which some tokens pass or all: the first one's, names and all."""
    first = next(i for i in range(shape.layers) if (shape.sparse(i), shape.skips(i)) == kind)
    return _grouped(shape, splitting, StagePart(range(first, first + 1), False, False), *index)


@lru_cache(maxsize=16384)
def _grouped(shape: ModelShape, splitting: tuple, part: StagePart, *index: int) -> Grouped:
    """The one unit of a part, counted once for all stages that it is in, and all stages of ZeRO."""
    layout = PLAIN.model_copy(update=dict(zip(SPLITTING, splitting, strict=True)))
    (unit,) = units_of(shape, layout, part, *index)
    together: dict[bool, list[LocalParameter]] = {}
    for held in unit:
        if not held.alone:
            together.setdefault(held.expert, []).append(held)
    return [Members.of([held]) for held in unit if held.alone], [*map(Members.of, together.values())]


def _buckets(units: Iterable[Grouped], limit: float, itemsize: int) -> Iterator[tuple[Bucket, list[int]]]:
    """As `shoal.engine.parallel.zero.zero_engine` fills them, with the numbers of the units that each is of; experts
    have their own."""
    filling: dict[bool, tuple[Bucket, list[int]]] = {}
    filled: Counter[bool] = Counter()
    for number, (alone, together) in enumerate(units):
        yield from (([members], [number]) for members in alone)
        for members in together:
            bucket, numbers = filling.setdefault(members.expert, ([], []))
            bucket.append(members)
            numbers.append(number)
            filled[members.expert] += members.allocated
        for kind in [kind for kind in filling if filled[kind] * itemsize >= limit]:
            filled[kind] = 0
            yield filling.pop(kind)
    yield from filling.values()
