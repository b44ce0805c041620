"""A route: what is done to two sharded arrays, step by step, to have their product lie as it is wanted. Plain data:
the search makes it and prices it (`shoal.labs.autoshard.notation.cost`), the executor runs it, the report draws it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.labs.autoshard.notation.moves import SLICE, Move, payload
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.product import ShardedProduct
from shoal.labs.collectives.description import VECTORS, Description, even
from shoal.labs.collectives.textbook import describe


@dataclass(frozen=True)
class RoutedMove:
    """One move, and by which algorithm.

    Attributes:
        algorithm: of `shoal.labs.collectives.textbook`; nothing for a slice.
        seconds: on the network that it was priced on.
    """

    move: Move
    before: Sharding
    algorithm: str = ""
    seconds: float = 0.0

    @property
    def after(self) -> Sharding:
        """How the array lies then."""
        return self.move.apply(self.before)

    def description(self, mesh: NamedMesh) -> Description | None:
        """The rounds among the ranks of one group; None where nothing is sent."""
        if self.move.kind == SLICE:
            return None
        return describe(self.move.kind, self.algorithm, mesh.size(self.move.axes))

    def sent(self, mesh: NamedMesh, sizes: Sizes) -> list[int]:
        """Elements that each rank of one group sends, to the last one."""
        description = self.description(mesh)
        if description is None:
            return [0]
        return elements_sent(description, payload(self.move, self.before, sizes, mesh))


def elements_sent(description: Description, size: int) -> list[int]:
    """Elements that each rank sends in a collective whose S is ``size`` elements.

    >>> elements_sent(describe("all-gather", "ring", 4), 8)
    [6, 6, 6, 6]
    """
    whole = size if description.collective in VECTORS else int(size * description.share) * description.blocks
    lengths = even(whole, description.blocks)
    sent = [0] * description.ranks
    for message in description.messages:
        sent[message.source] += sum(lengths[block] for block in message.blocks)
    return sent


@dataclass(frozen=True)
class Route:
    """A way to a product: moves of the left factor, moves of the right one, the blocks multiplied, moves of the result.

    Attributes:
        flops: of one device.
        compute: the seconds that they take.
    """

    names: tuple[str, str, str]
    product: ShardedProduct
    a: Sharding
    b: Sharding
    left: tuple[RoutedMove, ...]
    right: tuple[RoutedMove, ...]
    after: tuple[RoutedMove, ...]
    flops: float
    compute: float

    @property
    def multiplied(self) -> tuple[Sharding, Sharding]:
        """How the factors lie when they are multiplied."""
        return (self.left[-1].after if self.left else self.a, self.right[-1].after if self.right else self.b)

    @property
    def local(self) -> Sharding:
        """How the result lies just then."""
        local = self.product.local(*self.multiplied)
        assert local is not None, "the search multiplies only what can be"
        return local

    @property
    def out(self) -> Sharding:
        """How it lies in the end."""
        return self.after[-1].after if self.after else self.local

    @property
    def transfers(self) -> tuple[RoutedMove, ...]:
        """All moves."""
        return (*self.left, *self.right, *self.after)

    @property
    def communication(self) -> float:
        """Seconds of the moves, one after another."""
        return sum(transfer.seconds for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        """Of all, nothing overlapped."""
        return self.compute + self.communication


def elements_of(transfers: tuple[RoutedMove, ...], mesh: NamedMesh, sizes: Sizes) -> tuple[int, int]:
    """Elements that the busiest device sends in some moves, and all devices together."""
    most, total = [0] * mesh.ranks, 0
    for transfer in transfers:
        if transfer.move.kind == SLICE:
            continue
        sent = transfer.sent(mesh, sizes)
        groups = mesh.groups(transfer.move.axes)
        total += sum(sent) * len(groups)
        for group in groups:
            for rank, elements in zip(group, sent, strict=True):
                most[rank] += elements
    return max(most), total
