"""How one operator can be split over a mesh: an assignment of mesh axes to the letters of its iteration space.

How a tensor lies is a `Sharding` of the named-axis notation with the letters A, B, C, ... for its dims in order, so
that moves, prices and execution are those of `shoal.labs.autoshard.notation` and `shoal.labs.autoshard.notation.cost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from string import ascii_uppercase

from shoal.labs.autoshard.intra.spaces import Dims, IterationSpace
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding


@dataclass(frozen=True)
class OperatorSplit:
    """An operator as it is done.

    Attributes:
        operands: how each must lie.
        made: how its output lies when the blocks are done.
        out: how it lies for those who read it: as it was made, or after one collective.
        parts: into which its work is split.
    """

    operands: tuple[Sharding, ...]
    made: Sharding
    out: Sharding
    parts: int = 1


@cache
def lies(axes: tuple[str, ...], unreduced: str = "") -> Sharding:
    """A tensor by the mesh axes of each of its dims.

    >>> str(lies(("x", ""), "y"))
    '[Ax, B]{Uy}'
    """
    dims = tuple(zip(ascii_uppercase, axes, strict=False))
    return Sharding(dims, "".join(sorted(unreduced)))


def whole(rank: int) -> Sharding:
    """A copy on every device."""
    return lies(("",) * rank)


@cache
def sizes_of(shape: tuple[int, ...]) -> dict[str, int]:
    """Elements along each dim, by its letter in `lies`."""
    return dict(zip(ascii_uppercase, shape, strict=False))


def states(shape: tuple[int, ...], mesh: NamedMesh) -> list[Sharding]:
    """Every way in which a tensor can lie, each block equal, none unreduced."""
    found = []
    for dims in _assigned([str(d) for d in range(len(shape))], mesh):
        axes = tuple(dims.get(str(d), "") for d in range(len(shape)))
        if lies(axes).fits(sizes_of(shape), mesh):
            found.append(lies(axes))
    return found


def splits(space: IterationSpace, mesh: NamedMesh) -> list[OperatorSplit]:
    """Every way to do an operator whose output is then as it was made."""
    sums = [f"+{i}" for i in space.linear] + (["+"] if space.together else [])
    found = []
    for letters in _assigned([*space.sizes, *sums], mesh):
        if all(space.sizes.get(letter, 0) % mesh.size(axes) == 0 for letter, axes in letters.items()):
            found.append(split_by(space, letters, mesh))
    return found


def _assigned(targets: list[str], mesh: NamedMesh) -> Iterator[dict[str, str]]:
    """Mesh axes for targets, each axis for one or none; several for one in every order."""
    for given in product(["", *targets], repeat=len(mesh.axes)):
        found: dict[str, str] = {}
        for axis, target in zip(mesh.axes, given, strict=True):
            if target:
                found[target] = found.get(target, "") + axis
        orders = [["".join(order) for order in permutations(axes)] if target[0] != "+" else [axes]
                  for target, axes in found.items()]  # fmt: skip
        for axes in product(*orders):
            yield dict(zip(found, axes, strict=True))


def split_by(space: IterationSpace, letters: dict[str, str], mesh: NamedMesh) -> OperatorSplit:
    """An operator with mesh axes along its letters; ``+i`` is an operand i that is parts of a sum, ``+`` all are."""

    def along(dims: Dims) -> tuple[str, ...]:
        return tuple(letters.get(letter, "") for letter in dims)

    everywhere = letters.get("+", "")
    operands = tuple(
        lies(along(dims), everywhere + letters.get(f"+{i}", "")) for i, dims in enumerate(space.operands)
    )
    summed = "".join(letters.get(letter, "") for letter in sorted(space.summed))
    parts = everywhere + "".join(letters.get(f"+{i}", "") for i in space.linear)
    made = lies(along(space.out), summed + parts)
    return OperatorSplit(operands, made, made, mesh.size("".join(letters.get(letter, "") for letter in space.sizes)))


def follow(space: IterationSpace, operand: int, given: Sharding, mesh: NamedMesh) -> OperatorSplit:
    """An operator as one of its operands lies, or as near to that as it can be done.

    Where the operand is parts of a sum and the operator is not linear, the sum is made first; an axis along a dim that
    must be whole, or that does not come out even, goes.
    """
    letters: dict[str, str] = {}
    for letter, (_, axes) in zip(space.operands[operand], given.dims, strict=True):
        if letter and axes and space.sizes[letter] % mesh.size(axes) == 0:
            letters[letter] = axes
    if given.unreduced and operand in space.linear:
        letters[f"+{operand}"] = given.unreduced
    return split_by(space, letters, mesh)


def settled(made: Sharding, shape: tuple[int, ...], mesh: NamedMesh) -> list[Sharding]:
    """What can be done at once to an output that is parts of a sum: nothing, all-reduce, reduce-scatter into a dim."""
    if not made.unreduced:
        return [made]
    total = made.with_unreduced("")
    scattered = [
        lies(tuple(axes + made.unreduced if letter == into else axes for letter, axes in made.dims))
        for into, _ in made.dims
    ]
    return [made, lies(tuple(axes for _, axes in total.dims)),
            *(state for state in scattered if state.fits(sizes_of(shape), mesh))]  # fmt: skip
