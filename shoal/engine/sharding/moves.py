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

from dataclasses import dataclass
from functools import cached_property

from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
SLICE = "slice"


@dataclass(frozen=True)
class Move:
    """One move of one array.

    Attributes:
        kind: `SLICE`, or the name of a collective.
        axes: its mesh axes, in the order in which they shard (or will shard) a dim.
        source: the dim that the axes leave, for an all-gather and an all-to-all.
        target: the dim that they shard afterwards, for a reduce-scatter, an all-to-all and a slice.
        algorithm: of the collective; empty for a slice, and before the move is priced.
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
        after = self.before
        if self.source:
            after = after.with_axes(**{self.source: after.axes[self.source].removesuffix(self.axes)})
        if self.target:
            after = after.with_axes(**{self.target: after.axes[self.target] + self.axes})
        if self.kind in (ALL_REDUCE, REDUCE_SCATTER):
            after = after.with_unreduced("".join(axis for axis in after.unreduced if axis not in self.axes))
        return after

    def payload(self, mesh: NamedMesh, sizes: Sizes) -> int:
        """Return S of the collective in elements: the largest input or output of one rank."""
        n = self.before.local_numel(sizes, mesh)
        return n * mesh.size(self.axes) if self.kind == ALL_GATHER else n

    def sent(self, mesh: NamedMesh, sizes: Sizes) -> float:
        """Return the elements that a device sends, by an algorithm that sends the fewest (Chan et al. 2007)."""
        if self.kind == SLICE:
            return 0.0
        part = 1 - 1 / mesh.size(self.axes)
        return (2 if self.kind == ALL_REDUCE else 1) * part * self.payload(mesh, sizes)

    def __str__(self) -> str:
        words = [str(self.kind), self.axes]
        if self.source and self.target:
            return " ".join([*words, f"from {self.source} to {self.target}"])
        return " ".join([*words, *([f"of {self.source}"] if self.source else []),
                         *([f"into {self.target}"] if self.target else [])])
