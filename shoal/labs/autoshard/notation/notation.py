"""Named-axis notation: `A[Ix, J] * B[J, Ky] -> C[Ix, Ky]` (Austin et al. 2025, How to Scale Your Model, chapter 3).

An upper-case letter names a dim, the lower-case letters after it the mesh axes that it is sharded along, the first
outermost: `A[Ixy, J]` has I in |x| parts and each of them in |y|. Along an axis that the array does not mention there
are copies. `C[I, K]{Ux}` is unreduced along x: what the devices along x hold must be added up to give C.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from shoal.base.errors import UsageError, did_you_mean

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
        """Devices."""
        return math.prod(self.shape)

    def size(self, axes: str) -> int:
        """Devices along some axes together."""
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)

    def place(self, rank: int) -> dict[str, int]:
        """A rank's place along each axis."""
        place = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def position(self, rank: int, axes: str) -> int:
        """A rank's place along some axes taken as one, the first outermost."""
        place, position = self.place(rank), 0
        for axis in axes:
            position = position * self.size(axis) + place[axis]
        return position

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that differ along these axes alone, each in rising order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            others = tuple(at for axis, at in self.place(rank).items() if axis not in axes)
            found.setdefault(others, []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True)
class Sharding:
    """How an array lies on a mesh.

    Attributes:
        dims: each dim's letter and the axes that it is sharded along, the first outermost.
        unreduced: axes along which the devices hold parts of a sum, in alphabetical order.

    >>> str(Sharding((("I", "xy"), ("J", "")), "z"))
    '[Ixy, J]{Uz}'
    """

    dims: tuple[tuple[str, str], ...]
    unreduced: str = ""

    @cached_property
    def letters(self) -> str:
        """The dims."""
        return "".join(letter for letter, _ in self.dims)

    @cached_property
    def axes(self) -> dict[str, str]:
        """The axes of each dim."""
        return dict(self.dims)

    @cached_property
    def used(self) -> frozenset[str]:
        """Every axis that it mentions."""
        return frozenset("".join(axes for _, axes in self.dims) + self.unreduced)

    def with_axes(self, **axes: str) -> Sharding:
        """The same with other axes for some dims."""
        return Sharding(tuple((letter, axes.get(letter, old)) for letter, old in self.dims), self.unreduced)

    def with_unreduced(self, axes: str) -> Sharding:
        """The same with other unreduced axes."""
        return Sharding(self.dims, "".join(sorted(axes)))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(sizes[letter] for letter in self.letters)

    def local_shape(self, sizes: Sizes, mesh: NamedMesh) -> tuple[int, ...]:
        """Of what one device holds."""
        return tuple(sizes[letter] // mesh.size(axes) for letter, axes in self.dims)

    def local_numel(self, sizes: Sizes, mesh: NamedMesh) -> int:
        """Elements that one device holds."""
        return math.prod(self.local_shape(sizes, mesh))

    def fits(self, sizes: Sizes, mesh: NamedMesh) -> bool:
        """Whether all blocks are equal."""
        return all(sizes[letter] % mesh.size(axes) == 0 for letter, axes in self.dims)

    def copies(self, mesh: NamedMesh) -> int:
        """Devices that hold the same block (and the same part of the sum)."""
        return mesh.size("".join(axis for axis in mesh.axes if axis not in self.used))

    def __str__(self) -> str:
        dims = ", ".join(f"{letter}{axes}" for letter, axes in self.dims)
        return f"[{dims}]" + (f"{{U{self.unreduced}}}" if self.unreduced else "")


@dataclass(frozen=True)
class Array:
    """A name and how the array of that name lies."""

    name: str
    sharding: Sharding

    def __str__(self) -> str:
        return f"{self.name}{self.sharding}"


@dataclass(frozen=True)
class Expression:
    """What was written: one array, an array and how it shall lie, or a product of two arrays or more.

    Attributes:
        result: None where only an array was given.
        text: as it was typed.
        at: where in the text each (number of the array, dim) is, for messages; the result is the last array.
    """

    arrays: tuple[Array, ...]
    result: Array | None
    text: str = field(compare=False, default="")
    at: Mapping[tuple[int, str], int] = field(compare=False, default_factory=dict)

    def refuse(self, array: int, letter: str, message: str) -> UsageError:
        """An error that points at a dim of an array."""
        return pointing(self.text, self.at[array, letter], message)


def pointing(text: str, at: int, message: str) -> UsageError:
    """An error with a caret under the place in the text."""
    return UsageError(f"{message}\n  {text}\n  {' ' * at}^")


def parse_mesh(text: str) -> NamedMesh:
    """A mesh as it is typed: ``x=4,y=2``.

    Raises:
        UsageError: an axis is no lower-case letter, appears twice, or has no size.

    >>> parse_mesh("x=4,y=2")
    NamedMesh(axes='xy', shape=(4, 2))
    """
    sizes = _assignments("--mesh", text, "[a-z]", "a mesh axis is one lower-case letter with its devices, as x=4")
    return NamedMesh("".join(sizes), tuple(sizes.values()))


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes as they are typed: ``I=256,J=2048``; nothing for an empty text.

    Raises:
        UsageError: a dim is no upper-case letter, appears twice, or has no size.
    """
    what = "a dim is one upper-case letter with its elements, as I=256"
    return _assignments("--sizes", text, "[A-Z]", what) if text else {}


def _assignments(option: str, text: str, name: str, what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    at = len(option) + 1
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({name})\s*=\s*(\d+)\s*", part)
        if match is None or int(match[2]) == 0:
            raise pointing(f"{option} {text}", at, what)
        if match[1] in found:
            raise pointing(f"{option} {text}", at, f"'{match[1]}' is there twice")
        found[match[1]] = int(match[2])
        at += len(part) + 1
    return found


def parse(text: str, mesh: NamedMesh, sizes: Mapping[str, int], default: int | None = None) -> tuple[Expression, Sizes]:
    """Read an expression and prove that it means something on a mesh.

    Args:
        sizes: of dims.
        default: of those that ``sizes`` leaves out; without it they are refused.

    Returns:
        The expression, and the size of every dim in it.

    Raises:
        UsageError: it is malformed; a mesh axis is not there, or shards an array twice; a dim appears twice in an
            array, has no size, or one that its axes do not divide. The message points at the place.

    >>> parse("A[Ix, J]", NamedMesh("x", (4,)), {"I": 8, "J": 2})[0].arrays[0].sharding
    Sharding(dims=(('I', 'x'), ('J', '')), unreduced='')
    """
    expression = _Reader(text, mesh).expression()
    arrays = [*expression.arrays, *([expression.result] if expression.result else [])]
    known = dict(sizes)
    for i, array in enumerate(arrays):
        for letter, axes in array.sharding.dims:
            if letter not in known and default is None:
                raise expression.refuse(i, letter, f"dim {letter} has no size; give it one: --sizes {letter}=1024")
            size, parts = known.setdefault(letter, default or 0), mesh.size(axes)
            if size % parts:
                near = max(1, size // parts) * parts
                message = f"dim {letter} of {size} does not come out even over {parts} devices along {axes}; "
                raise expression.refuse(i, letter, message + f"near it: --sizes {letter}={near}")
    for letter in sizes:
        if not any(letter in array.sharding.letters for array in arrays):
            letters = {letter: None for array in arrays for letter in array.sharding.letters}
            raise UsageError(f"--sizes {letter}={sizes[letter]}: there is no dim {letter} in {text}; "
                             f"{did_you_mean(letter, letters)}")
    return expression, {letter: known[letter] for array in arrays for letter in array.sharding.letters}


class _Reader:
    """A recursive-descent reader: one method for each kind of phrase."""

    def __init__(self, text: str, mesh: NamedMesh):
        self.text, self.mesh, self.next = text, mesh, 0
        self.at: dict[tuple[int, str], int] = {}
        self.arrays = 0

    def expression(self) -> Expression:
        arrays = [self.array()]
        while self.takes("*", "·"):
            arrays.append(self.array())
        result = self.array() if self.takes("->", "→") else None
        if self.peek():
            raise self.error("the end, `*` and another array, or `->` and the result are expected here")
        if result is None and len(arrays) > 1:
            raise self.error("the result is missing: end with `-> C[...]`")
        return Expression(tuple(arrays), result, self.text, self.at)

    def array(self) -> Array:
        name = self.take(r"[A-Za-z_][A-Za-z_0-9]*", "an array's name is expected here, as in A[Ix, J]")
        self.take(r"\[", f"`[` and the dims of {name} are expected here")
        seen: dict[str, str] = {}  # from the axis to what it is used for
        dims = [self.dim(seen, [])]
        while self.takes(","):
            dims.append(self.dim(seen, [letter for letter, _ in dims]))
        self.take(r"\]", "`,` and another dim, or `]`, are expected here")
        unreduced = ""
        if self.takes("{"):
            self.take("U", "`U` and the unreduced axes are expected here, as in {Ux}")
            unreduced = self.mesh_axes(seen, "a sum")
            if not unreduced:
                raise self.error("the axis along which it is unreduced is expected here, as in {Ux}")
            self.take(r"\}", "`}` is expected here")
        self.arrays += 1
        return Array(name, Sharding(tuple(dims), "".join(sorted(unreduced))))

    def dim(self, seen: dict[str, str], before: list[str]) -> tuple[str, str]:
        self.peek()
        at = self.next
        letter = self.take("[A-Z]", "a dim is expected here: one upper-case letter, then its mesh axes, as in Ix")
        if letter in before:
            raise pointing(self.text, at, f"dim {letter} is there twice in one array; call one of them otherwise")
        self.at[self.arrays, letter] = at
        return letter, self.mesh_axes(seen, f"dim {letter}")

    def mesh_axes(self, seen: dict[str, str], what: str) -> str:
        """The lower-case letters from here on."""
        axes = ""
        while self.next < len(self.text) and self.text[self.next].islower():
            axis = self.text[self.next]
            if axis not in self.mesh.axes:
                raise self.error(f"there is no mesh axis '{axis}'; {did_you_mean(axis, self.mesh.axes)}")
            if axis in seen:
                raise self.error(f"axis {axis} already shards {seen[axis]} of this array; it can be used once")
            seen[axis] = what
            axes += axis
            self.next += 1
        return axes

    def peek(self) -> str:
        """What comes after blanks, nothing at the end."""
        while self.next < len(self.text) and self.text[self.next].isspace():
            self.next += 1
        return self.text[self.next :]

    def takes(self, *words: str) -> bool:
        """Whether one of the words comes next; it is read."""
        rest = self.peek()
        word = next((word for word in words if rest.startswith(word)), "")
        self.next += len(word)
        return bool(word)

    def take(self, pattern: str, expected: str) -> str:
        self.peek()
        match = re.compile(pattern).match(self.text, self.next)
        if match is None:
            raise self.error(expected)
        self.next = match.end()
        return match[0]

    def error(self, message: str) -> UsageError:
        return pointing(self.text, self.next, message)


def blocks(sharding: Sharding, mesh: NamedMesh) -> dict[tuple[int, ...], list[list[int]]]:
    """Who holds each block: for each term of its sum (one, unless the array is unreduced) the ranks with a copy.

    >>> blocks(Sharding((("I", "x"),), "y"), NamedMesh("xy", (2, 2)))
    {(0,): [[0], [1]], (1,): [[2], [3]]}
    """
    counts = [range(mesh.size(axes)) for _, axes in sharding.dims]
    terms = range(mesh.size(sharding.unreduced))
    held: dict[tuple[int, ...], list[list[int]]] = {place: [[] for _ in terms] for place in product(*counts)}
    for rank in range(mesh.ranks):
        place = tuple(mesh.position(rank, axes) for _, axes in sharding.dims)
        held[place][mesh.position(rank, sharding.unreduced)].append(rank)
    return held
