"""Moves, which change the sharding of an array and not its values: four collectives, and a slice.

    all-gather       A[Ix, J]      -> A[I, J]       the last axes of a dim are removed
    reduce-scatter   A[I, J]{Ux}   -> A[Ix, J]      unreduced axes are summed and shard a dim
    all-reduce       A[I, J]{Ux}   -> A[I, J]       unreduced axes are summed
    all-to-all       A[Ix, J]      -> A[I, Jx]      the last axes of one dim become the last of another
    slice            A[I, J]       -> A[Ix, J]      every device keeps its part of a replicated array: nothing is sent

An all-gather removes the innermost axes of a dim alone: without the outermost one, a device would no longer hold a
contiguous block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, permutations

from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding, Sizes
from shoal.labs.collectives.description import VECTORS, Collective, Description, even
from shoal.labs.collectives.textbook import describe

SLICE = "slice"


@dataclass(frozen=True)
class Move:
    """One move of one array.

    Attributes:
        kind: a collective, or `SLICE`.
        axes: its mesh axes, in the order in which they shard (or will shard) a dim.
        source: the dim that the axes leave, for an all-gather and an all-to-all.
        target: the dim that they shard afterwards, for a reduce-scatter, an all-to-all and a slice.
        algorithm: a key of `shoal.labs.collectives.textbook`; empty for a slice, and before the move is priced.
        seconds: on the network that it was priced on.
    """

    kind: str
    before: Sharding
    axes: str
    source: str = ""
    target: str = ""
    algorithm: str = ""
    seconds: float = 0.0

    @cached_property
    def after(self) -> Sharding:
        """The sharding that it leads to."""
        after = self.before
        if self.source:
            after = after.with_axes(**{self.source: after.axes[self.source].removesuffix(self.axes)})
        if self.target:
            after = after.with_axes(**{self.target: after.axes[self.target] + self.axes})
        if self.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            after = after.with_unreduced("".join(axis for axis in after.unreduced if axis not in self.axes))
        return after

    def payload(self, mesh: NamedMesh, sizes: Sizes) -> int:
        """Return S of the collective in elements: the largest input or output of one rank."""
        n = self.before.local_numel(sizes, mesh)
        return n * mesh.size(self.axes) if self.kind == Collective.ALL_GATHER else n

    def description(self, mesh: NamedMesh) -> Description:
        """Return the rounds of a collective among the ranks of one group."""
        return describe(self.kind, self.algorithm, mesh.size(self.axes))

    def __str__(self) -> str:
        words = [str(self.kind), self.axes]
        if self.source and self.target:
            return " ".join([*words, f"from {self.source} to {self.target}"])
        return " ".join([*words, *([f"of {self.source}"] if self.source else []),
                         *([f"into {self.target}"] if self.target else [])])


def list_moves(sharding: Sharding, mesh: NamedMesh, sizes: Sizes) -> Iterator[Move]:
    """List every possible next move. All blocks stay equal: no dim is split unevenly."""

    def even(letter: str, axes: str) -> bool:
        return sizes[letter] % mesh.size(sharding.axes[letter] + axes) == 0

    for letter, axes in sharding.dims:
        for start in range(len(axes)):
            tail = axes[start:]
            yield Move(Collective.ALL_GATHER, sharding, tail, source=letter)
            for other in sharding.letters:
                if other != letter and even(other, tail):
                    yield Move(Collective.ALL_TO_ALL, sharding, tail, source=letter, target=other)
    sums = sharding.unreduced
    for some in chain.from_iterable(combinations(sums, n) for n in range(1, len(sums) + 1)):
        yield Move(Collective.ALL_REDUCE, sharding, "".join(some))
        for order in map("".join, permutations(some)):
            for letter in sharding.letters:
                if even(letter, order):
                    yield Move(Collective.REDUCE_SCATTER, sharding, order, target=letter)
    for axis in mesh.axes:
        if axis not in sharding.used:
            for letter in sharding.letters:
                if even(letter, axis):
                    yield Move(SLICE, sharding, axis, target=letter)


def count_sent(moves: Sequence[Move], mesh: NamedMesh, sizes: Sizes) -> tuple[int, int]:
    """Count the elements that the busiest device sends in some moves, and all devices together."""
    per_rank = [0] * mesh.ranks
    for move in moves:
        if move.kind == SLICE:
            continue
        sent = count_collective(move.description(mesh), move.payload(mesh, sizes))
        for group in mesh.groups(move.axes):
            for rank, elements in zip(group, sent, strict=True):
                per_rank[rank] += elements
    return max(per_rank), sum(per_rank)


def count_collective(description: Description, size: int) -> list[int]:
    """Count the elements that each rank sends in a collective whose S is ``size`` elements.

    >>> count_collective(describe("all-gather", "ring", 4), 8)
    [6, 6, 6, 6]
    """
    total = size if description.collective in VECTORS else int(size * description.share) * description.blocks
    lengths = even(total, description.blocks)
    sent = [0] * description.ranks
    for message in description.messages:
        sent[message.source] += sum(lengths[block] for block in message.blocks)
    return sent
