"""Boxes of tensors: the part of an unsharded tensor that a rank holds.

A layout may split a parameter twice: tensor parallelism takes a box of the unsharded tensor, and ZeRO takes a flat
range of that box (buckets are cut into equal parts, at any element). A flat range of a box is a few smaller boxes, so
every shard of every layout is a list of `Piece`. Checkpoints store pieces and the verifier gathers them, without
knowing how the layout split them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Box(NamedTuple):
    """A block of a tensor: index range ``offset[d] : offset[d] + shape[d]`` in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def full(shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box from the unsharded tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def to_local(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``, which contains it."""
        return Box(tuple(o - p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape)

    def to_global(self, outer: Box) -> Box:
        """Return this box, given in the coordinates of ``outer``, in global coordinates."""
        return Box(tuple(o + p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty."""
        start, shape = [], []
        for a, m, b, n in zip(*self, *other, strict=True):
            low, high = max(a, b), min(a + m, b + n)
            if high <= low:
                return None
            start.append(low)
            shape.append(high - low)
        return Box(tuple(start), tuple(shape))


@dataclass
class Piece:
    """One box of a named tensor and the local memory that holds it."""

    global_shape: tuple[int, ...]  # global shape of the tensor, without padding
    box: Box  # the part of the tensor
    tensor: torch.Tensor  # local values of shape ``box.shape`` (a view where possible, so that loading writes into it)
    primary: bool = True  # whether this rank saves the box; other ranks may hold equal copies

    @staticmethod
    def full(tensor: torch.Tensor, primary: bool = True) -> Piece:
        """Return an unsharded tensor as a piece."""
        return Piece(tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor, primary)


def flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut elements ``start:stop`` of a row-major tensor into boxes: ``(offset from start, box)``, in memory order.

    Yields at most ``2 x dims - 1`` boxes: a partial first row, full rows, a partial last row, and so on in each dim.

    >>> [(o, b.offset, b.shape) for o, b in flat_range((4, 3), 2, 11)]
    [(0, (0, 2), (1, 1)), (1, (1, 0), (2, 3)), (7, (3, 0), (1, 2))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield 0, Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows are first:last
    if first > last:  # inside one row
        yield from _in_row(shape, first - 1, start - (first - 1) * row, stop - (first - 1) * row, 0)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, row - (first * row - start), row, 0)
    if first < last:
        yield first * row - start, Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row, last * row - start)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int, base: int) -> Iterator[tuple[int, Box]]:
    for offset, box in flat_range(shape[1:], start, stop):
        yield base + offset, Box((row, *box.offset), (1, *box.shape))
