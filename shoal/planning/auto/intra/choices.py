"""Ways to split one operator over a mesh: an assignment of mesh axes to the letters of its iteration space.

Tensors have a `Sharding` of the named-axis notation with the letters A, B, C, ... for their dims in order, so that
`shoal.planning.auto.moves` lists and prices their moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations, product

from shoal.engine.sharding.graph import Operator
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes, by_position, replicated
from shoal.engine.sharding.plan import OperatorSplit
from shoal.planning.auto.intra.spaces import Dims, IterationSpace


def split_nothing(operands: Iterable[Operator], op: Operator) -> OperatorSplit:
    """Make the split of an operator that every device computes in full."""
    out = replicated(len(op.shape))
    return OperatorSplit(tuple(replicated(len(operand.shape)) for operand in operands), out, out)


def list_shardings(sizes: Sizes, mesh: NamedMesh) -> list[Sharding]:
    """List every sharding of a tensor with equal blocks, none of them unreduced."""
    found = [by_position(tuple(dims.get(letter, "") for letter in sizes)) for dims in _assign_axes([*sizes], mesh)]
    return [sharding for sharding in found if sharding.fits(sizes, mesh)]


def list_splits(space: IterationSpace, mesh: NamedMesh) -> list[OperatorSplit]:
    """List every way to split an operator, with its output left as it is made."""
    sums = [f"+{i}" for i in space.linear] + (["+"] if space.together else [])
    return [
        split_by(space, letters, mesh) for letters in _assign_axes([*space.sizes, *sums], mesh)
        if all(space.sizes.get(letter, 0) % mesh.size(axes) == 0 for letter, axes in letters.items())
    ]  # fmt: skip


def _assign_axes(targets: list[str], mesh: NamedMesh) -> Iterator[dict[str, str]]:
    """Assign each mesh axis to one target or none; several axes of one target in every order."""
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
    """Split an operator by mesh axes along its letters.

    Args:
        letters: axes by letter; axes of ``+i`` leave operand i unreduced, axes of ``+`` all operands.
    """

    def along(dims: Dims) -> tuple[str, ...]:
        return tuple(letters.get(letter, "") for letter in dims)

    everywhere = letters.get("+", "")
    operands = tuple(
        by_position(along(dims), everywhere + letters.get(f"+{i}", "")) for i, dims in enumerate(space.operands)
    )
    summed = "".join(letters.get(letter, "") for letter in sorted(space.summed))
    terms = everywhere + "".join(letters.get(f"+{i}", "") for i in space.linear)
    made = by_position(along(space.out), summed + terms)
    return OperatorSplit(operands, made, made, mesh.size("".join(along(tuple(space.sizes)))))


def follow(space: IterationSpace, operand: int, given: Sharding, mesh: NamedMesh) -> OperatorSplit:
    """Split an operator by the sharding of one of its operands, or by as much of it as the operator allows.

    Where the operand is unreduced and the operator is not linear in it, the sum is made first; axes along a dim that
    cannot be split, or not evenly, are dropped.
    """
    letters: dict[str, str] = {}
    for letter, (_, axes) in zip(space.operands[operand], given.dims, strict=True):
        if letter and axes and space.sizes[letter] % mesh.size(axes) == 0:
            letters[letter] = axes
    if given.unreduced and operand in space.linear:
        letters[f"+{operand}"] = given.unreduced
    return split_by(space, letters, mesh)


def list_reductions(made: Sharding, sizes: Sizes, mesh: NamedMesh) -> list[Sharding]:
    """List what one collective can make of an output: as it is; if unreduced, all-reduced, or scattered into a dim."""
    if not made.unreduced:
        return [made]
    total = made.reduced
    scattered = [total.with_axes(**{letter: axes + made.unreduced}) for letter, axes in made.dims]
    return [made, total, *(sharding for sharding in scattered if sharding.fits(sizes, mesh))]
