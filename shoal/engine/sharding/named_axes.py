"""Named axes: how an array is distributed over a mesh, as `[Ix, J]` (Austin et al. 2025, How to Scale Your Model).

An upper-case letter names a dim, the lower-case letters after it the mesh axes that it is sharded along, the first
outermost. Along an axis that it does not mention, an array is replicated. `[I, K]{Ux}` is unreduced along x: the
devices along x hold the terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from string import ascii_uppercase

from shoal.base.boxes import Box

Sizes = Mapping[str, int]
"""Elements along each dim, by its letter."""


@dataclass(frozen=True)
class NamedMesh:
    """A grid of devices whose axes have names; the last axis varies fastest with the rank.

    >>> mesh = NamedMesh("xy", (4, 2))
    >>> mesh.place(5), mesh.groups("x")
    ({'x': 2, 'y': 1}, ((0, 2, 4, 6), (1, 3, 5, 7)))
    """

    axes: str
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    def size(self, axes: str) -> int:
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis."""
        place = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def position(self, rank: int, axes: str) -> int:
        """Return a rank's place along some axes taken as one, the first outermost."""
        place, position = self.place(rank), 0
        for axis in axes:
            position = position * self.size(axis) + place[axis]
        return position

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along these axes alone, each in rising order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            others = tuple(at for axis, at in self.place(rank).items() if axis not in axes)
            found.setdefault(others, []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True)
class Sharding:
    """How an array is distributed over a mesh.

    Attributes:
        dims: each dim's letter and the axes that shard it, the first outermost.
        unreduced: axes along which the devices hold terms of a sum, in alphabetical order.

    >>> str(Sharding((("I", "xy"), ("J", "")), "z"))
    '[Ixy, J]{Uz}'
    """

    dims: tuple[tuple[str, str], ...]
    unreduced: str = ""

    @cached_property
    def letters(self) -> str:
        return "".join(letter for letter, _ in self.dims)

    @cached_property
    def axes(self) -> dict[str, str]:
        return dict(self.dims)

    @cached_property
    def used(self) -> frozenset[str]:
        """Every axis that it mentions."""
        return frozenset("".join(axes for _, axes in self.dims) + self.unreduced)

    def with_axes(self, **axes: str) -> Sharding:
        """Return the same with other axes for some dims."""
        return Sharding(tuple((letter, axes.get(letter, old)) for letter, old in self.dims), self.unreduced)

    def with_unreduced(self, axes: str) -> Sharding:
        return Sharding(self.dims, "".join(sorted(axes)))

    @property
    def reduced(self) -> Sharding:
        """The same with sums added up: so a gradient is sharded, since every term of a sum has the sum's gradient."""
        return Sharding(self.dims)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in self.letters)

    def local_shape(self, sizes: Sizes, mesh: NamedMesh) -> tuple[int, ...]:
        """Return the shape of one device's block."""
        return tuple(sizes[letter] // mesh.size(axes) for letter, axes in self.dims)

    def local_numel(self, sizes: Sizes, mesh: NamedMesh) -> int:
        """Return the number of elements of one device's block."""
        return math.prod(self.local_shape(sizes, mesh))

    def fits(self, sizes: Sizes, mesh: NamedMesh) -> bool:
        """Whether every dim divides evenly over its axes."""
        return all(sizes[letter] % mesh.size(axes) == 0 for letter, axes in self.dims)

    def copies(self, mesh: NamedMesh) -> int:
        """Return how many devices hold the same block (and the same term of the sum)."""
        return mesh.size("".join(axis for axis in mesh.axes if axis not in self.used))

    def __str__(self) -> str:
        dims = ", ".join(f"{letter}{axes}" for letter, axes in self.dims)
        return f"[{dims}]" + (f"{{U{self.unreduced}}}" if self.unreduced else "")


@cache
def by_position(axes: tuple[str, ...], unreduced: str = "") -> Sharding:
    """Make a tensor's sharding from the mesh axes of each of its dims.

    >>> str(by_position(("x", ""), "y"))
    '[Ax, B]{Uy}'
    """
    return Sharding(tuple(zip(ascii_uppercase, axes, strict=False)), "".join(sorted(unreduced)))


def replicated(ndim: int) -> Sharding:
    """Make the sharding of a tensor that every device holds in full."""
    return by_position(("",) * ndim)


def block_box(sharding: Sharding, rank: int, sizes: Sizes, mesh: NamedMesh) -> Box:
    """Return the index range of a rank's block; of an unreduced array, of the block whose term it holds."""
    shape = sharding.local_shape(sizes, mesh)
    return Box(tuple(n * mesh.position(rank, axes) for n, (_, axes) in zip(shape, sharding.dims, strict=True)), shape)
