"""Named-axis notation: `A[Ix, J] * B[J, Ky] -> C[Ix, Ky]` (Austin et al. 2025, How to Scale Your Model, chapter 3).

An upper-case letter names a dim, the lower-case letters after it the mesh axes that it is sharded along, the first
outermost: `A[Ixy, J]` has I in |x| parts and each of these in |y|. Along an axis that it does not mention, an array is
replicated. `C[I, K]{Ux}` is unreduced along x: the devices along x hold the terms of a sum, which is C.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes


@dataclass(frozen=True)
class Array:
    name: str
    sharding: Sharding

    def __str__(self) -> str:
        return f"{self.name}{self.sharding}"


@dataclass(frozen=True)
class Expression:
    """A parsed expression: one array, a resharding, or a product of two arrays or more.

    Attributes:
        result: None for an array alone.
        text: as it was typed.
        at: the position in the text of each (number of the array, dim), for messages; the result is the last array.
    """

    arrays: tuple[Array, ...]
    result: Array | None
    text: str = field(compare=False, default="")
    at: Mapping[tuple[int, str], int] = field(compare=False, default_factory=dict)

    def refuse(self, array: int, letter: str, message: str) -> UsageError:
        return point_at(self.text, self.at[array, letter], message)


def point_at(text: str, at: int, message: str) -> UsageError:
    """Make an error with a caret under a position of the text."""
    return UsageError(f"{message}\n  {text}\n  {' ' * at}^")


def parse_mesh(text: str) -> NamedMesh:
    """Parse a mesh such as ``x=4,y=2``.

    Raises:
        UsageError: an axis is no lower-case letter, appears twice, or has no size.

    >>> parse_mesh("x=4,y=2")
    NamedMesh(axes='xy', shape=(4, 2))
    """
    sizes = _parse_assignments("--mesh", text, "[a-z]", "a mesh axis is one lower-case letter with its devices, as x=4")
    return NamedMesh("".join(sizes), tuple(sizes.values()))


def parse_sizes(text: str) -> dict[str, int]:
    """Parse sizes such as ``I=256,J=2048``; an empty text has none.

    Raises:
        UsageError: a dim is no upper-case letter, appears twice, or has no size.
    """
    what = "a dim is one upper-case letter with its elements, as I=256"
    return _parse_assignments("--sizes", text, "[A-Z]", what) if text else {}


def _parse_assignments(option: str, text: str, name: str, what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    at = len(option) + 1
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({name})\s*=\s*(\d+)\s*", part)
        if match is None or int(match[2]) == 0:
            raise point_at(f"{option} {text}", at, what)
        if match[1] in found:
            raise point_at(f"{option} {text}", at, f"'{match[1]}' is given twice")
        found[match[1]] = int(match[2])
        at += len(part) + 1
    return found


def parse(text: str, mesh: NamedMesh, sizes: Mapping[str, int], default: int | None = None) -> tuple[Expression, Sizes]:
    """Parse an expression and check it against a mesh.

    Args:
        default: size of the dims that ``sizes`` lacks; without it they are refused.

    Returns:
        The expression, and the size of every dim in it.

    Raises:
        UsageError: it is malformed; a mesh axis does not exist, or shards an array twice; a dim appears twice in an
            array, has no size, or one that its axes do not divide. The message points at the place.

    >>> parse("A[Ix, J]", NamedMesh("x", (4,)), {"I": 8, "J": 2})[0].arrays[0].sharding
    Sharding(dims=(('I', 'x'), ('J', '')), unreduced='')
    """
    expression = _Parser(text, mesh).expression()
    arrays = [*expression.arrays, *([expression.result] if expression.result else [])]
    known = dict(sizes)
    for i, array in enumerate(arrays):
        for letter, axes in array.sharding.dims:
            if letter not in known and default is None:
                raise expression.refuse(i, letter, f"dim {letter} has no size; give it one: --sizes {letter}=1024")
            size, parts = known.setdefault(letter, default or 0), mesh.size(axes)
            if size % parts:
                near = max(1, size // parts) * parts
                message = f"dim {letter} of {size} does not divide evenly over {parts} devices along {axes}; "
                raise expression.refuse(i, letter, message + f"nearest: --sizes {letter}={near}")
    for letter in sizes:
        if not any(letter in array.sharding.letters for array in arrays):
            letters = {letter: None for array in arrays for letter in array.sharding.letters}
            raise UsageError(f"--sizes {letter}={sizes[letter]}: {text} has no dim {letter}; "
                             f"{did_you_mean(letter, letters)}")
    return expression, {letter: known[letter] for array in arrays for letter in array.sharding.letters}


class _Parser:
    """A recursive-descent parser: one method for each kind of phrase."""

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
        seen: dict[str, str] = {}  # from the axis to its use
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
            raise point_at(self.text, at, f"dim {letter} appears twice in one array; rename one of them")
        self.at[self.arrays, letter] = at
        return letter, self.mesh_axes(seen, f"dim {letter}")

    def mesh_axes(self, seen: dict[str, str], what: str) -> str:
        """Read the lower-case letters that come next."""
        axes = ""
        while self.next < len(self.text) and self.text[self.next].islower():
            axis = self.text[self.next]
            if axis not in self.mesh.axes:
                raise self.error(f"the mesh has no axis '{axis}'; {did_you_mean(axis, self.mesh.axes)}")
            if axis in seen:
                raise self.error(f"axis {axis} already shards {seen[axis]} of this array; it can be used once")
            seen[axis] = what
            axes += axis
            self.next += 1
        return axes

    def peek(self) -> str:
        """Skip blanks; return the rest of the text."""
        while self.next < len(self.text) and self.text[self.next].isspace():
            self.next += 1
        return self.text[self.next :]

    def takes(self, *words: str) -> bool:
        """Read one of the words if it comes next; return whether it does."""
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
        return point_at(self.text, self.next, message)


def list_holders(sharding: Sharding, mesh: NamedMesh) -> dict[tuple[int, ...], list[list[int]]]:
    """List the ranks with a copy of each block, for each term of its sum (one, unless the array is unreduced).

    >>> list_holders(Sharding((("I", "x"),), "y"), NamedMesh("xy", (2, 2)))
    {(0,): [[0], [1]], (1,): [[2], [3]]}
    """
    counts = [range(mesh.size(axes)) for _, axes in sharding.dims]
    terms = range(mesh.size(sharding.unreduced))
    held: dict[tuple[int, ...], list[list[int]]] = {place: [[] for _ in terms] for place in product(*counts)}
    for rank in range(mesh.ranks):
        place = tuple(mesh.position(rank, axes) for _, axes in sharding.dims)
        held[place][mesh.position(rank, sharding.unreduced)].append(rank)
    return held
