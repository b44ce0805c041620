"""What the algorithm of a move sends."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.sharding.moves import SLICE, Move
from shoal.engine.sharding.named_axes import NamedMesh, Sizes
from shoal.labs.collectives.description import VECTORS, Description, even
from shoal.labs.collectives.textbook import describe


def describe_move(move: Move, mesh: NamedMesh) -> Description:
    """Return the rounds of a collective among the ranks of one group."""
    return describe(move.kind, move.algorithm, mesh.size(move.axes))


def count_sent(moves: Sequence[Move], mesh: NamedMesh, sizes: Sizes) -> tuple[int, int]:
    """Count the elements that the busiest device sends in some moves, and all devices together."""
    per_rank = [0] * mesh.ranks
    for move in moves:
        if move.kind == SLICE:
            continue
        sent = count_collective(describe_move(move, mesh), move.payload(mesh, sizes))
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
