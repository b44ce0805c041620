"""What may be done to a sharded array without changing what it says: five moves, four of them collectives.

    all-gather       A[Ix, J]      -> A[I, J]       the last axes of a dim go
    reduce-scatter   A[I, J]{Ux}   -> A[Ix, J]      unreduced axes are added up and shard a dim
    all-reduce       A[I, J]{Ux}   -> A[I, J]       unreduced axes are added up
    all-to-all       A[Ix, J]      -> A[I, Jx]      the last axes of one dim become the last of another
    slice            A[I, J]       -> A[Ix, J]      every device keeps its part of what all have: nothing is sent

An all-gather takes away the innermost axes of a dim alone: without the outermost one, what a device has would not be a
block any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, permutations

from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding, Sizes
from shoal.labs.collectives.description import Collective

SLICE = "slice"


@dataclass(frozen=True)
class Move:
    """One move of one array.

    Attributes:
        kind: a collective, or `SLICE`.
        axes: the mesh axes over which it goes, in the order in which they shard (or will shard) a dim.
        source: the dim that the axes leave, for an all-gather and an all-to-all.
        target: the dim that they shard then, for a reduce-scatter, an all-to-all and a slice.
    """

    kind: str
    axes: str
    source: str = ""
    target: str = ""

    def apply(self, sharding: Sharding) -> Sharding:
        """How the array lies afterwards."""
        after = sharding
        if self.source:
            after = after.with_axes(**{self.source: after.axes[self.source].removesuffix(self.axes)})
        if self.target:
            after = after.with_axes(**{self.target: after.axes[self.target] + self.axes})
        if self.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            after = after.with_unreduced("".join(axis for axis in after.unreduced if axis not in self.axes))
        return after

    def __str__(self) -> str:
        words = [str(self.kind), self.axes]
        if self.source and self.target:
            return " ".join([*words, f"from {self.source} to {self.target}"])
        return " ".join([*words, *([f"of {self.source}"] if self.source else []),
                         *([f"into {self.target}"] if self.target else [])])


def moves(sharding: Sharding, mesh: NamedMesh, sizes: Sizes) -> Iterator[Move]:
    """All that can be done next. Blocks stay equal: no dim gets parts that do not come out even."""

    def even(letter: str, axes: str) -> bool:
        return sizes[letter] % mesh.size(sharding.axes[letter] + axes) == 0

    for letter, axes in sharding.dims:
        for start in range(len(axes)):
            tail = axes[start:]
            yield Move(Collective.ALL_GATHER, tail, source=letter)
            for other in sharding.letters:
                if other != letter and even(other, tail):
                    yield Move(Collective.ALL_TO_ALL, tail, source=letter, target=other)
    for some in _subsets(sharding.unreduced):
        yield Move(Collective.ALL_REDUCE, "".join(some))
        for order in permutations(some):
            for letter in sharding.letters:
                if even(letter, "".join(order)):
                    yield Move(Collective.REDUCE_SCATTER, "".join(order), target=letter)
    for axis in mesh.axes:
        if axis not in sharding.used:
            for letter in sharding.letters:
                if even(letter, axis):
                    yield Move(SLICE, axis, target=letter)


def _subsets(axes: str) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1))


def payload(move: Move, before: Sharding, sizes: Sizes, mesh: NamedMesh) -> int:
    """S of the collective in elements: the largest input or output of one rank."""
    n = before.local_numel(sizes, mesh)
    return n * mesh.size(move.axes) if move.kind == Collective.ALL_GATHER else n
