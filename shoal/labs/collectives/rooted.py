"""Scatter and broadcast from a root. Their duals are gather and reduce.

Each function takes the ranks with the root first. ``parts[i]`` are the blocks of the rank at position i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from shoal.labs.collectives.description import Message

Ranks = Sequence[int]
Blocks = tuple[int, ...]
Parts = Sequence[Blocks]
Rounds = list[list[Message]]


def dual(rounds: Rounds, *, reduce: bool = False) -> Rounds:
    """Reverse the order and direction of all messages (Chan et al. 2007, section 2).

    A scatter becomes a gather. With ``reduce`` a broadcast becomes a reduce, and an all-gather in which a rank gets
    each block once becomes a reduce-scatter: the tree on which a block spread is the tree on which it is summed.
    """
    return [[Message(m.target, m.source, m.blocks, reduce) for m in messages] for messages in reversed(rounds)]


def merge(*several: Rounds) -> Rounds:
    """Merge algorithms that run at the same time on different ranks."""
    return [list(chain.from_iterable(messages)) for messages in zip_longest(*several, fillvalue=())]


def join(parts: Iterable[Blocks]) -> Blocks:
    """Concatenate the blocks of several ranks."""
    return tuple(chain.from_iterable(parts))


def halves(n: int) -> list[int]:
    """Return the powers of two below n, the largest first.

    >>> halves(6)
    [4, 2, 1]
    """
    return [1 << k for k in reversed(range((n - 1).bit_length()))]


# ---- scatter --------------------------------------------------------------------------------------------------------


def flat_scatter(ranks: Ranks, parts: Parts) -> Rounds:
    """The root sends each rank its part, one after another."""
    return [[Message(ranks[0], ranks[i], parts[i])] for i in range(1, len(ranks))]


def tree_scatter(ranks: Ranks, parts: Parts) -> Rounds:
    """A binomial tree: a rank with a range of parts sends its upper half (Thakur, Rabenseifner & Gropp 2005, 4.1)."""
    n = len(ranks)
    return [
        [
            Message(ranks[i], ranks[i + half], join(parts[i + half : i + 2 * half]))
            for i in range(0, n - half, 2 * half)
        ]
        for half in halves(n)
    ]


def ring_scatter(ranks: Ranks, parts: Parts) -> Rounds:
    """A chain: the part of the farthest rank goes first, and a rank keeps the last part that it receives."""
    last = len(ranks) - 1
    return [
        [Message(ranks[i], ranks[i + 1], parts[last - t + i]) for i in range(t + 1)]
        for t in range(last)
    ]


# ---- broadcast ------------------------------------------------------------------------------------------------------


def flat_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """The root sends everything to each rank, one after another."""
    return [[Message(ranks[0], ranks[i], blocks)] for i in range(1, len(ranks))]


def tree_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """A binomial tree: every round doubles the number of ranks with the data."""
    n = len(ranks)
    return [
        [Message(ranks[i], ranks[i + half], blocks) for i in range(0, n - half, 2 * half)] for half in halves(n)
    ]


def ring_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """A pipelined chain: every rank forwards each block as soon as it has it."""
    n = len(ranks)
    if n == 1:
        return []
    return [
        [Message(ranks[i], ranks[i + 1], (blocks[t - i],)) for i in range(n - 1) if 0 <= t - i < len(blocks)]
        for t in range(len(blocks) + n - 2)
    ]


# ---- inside the nodes and between them ------------------------------------------------------------------------------

Nodes = Sequence[Ranks]
"""The ranks of each node, the root's node first and in each node the root's position first."""


def hierarchical_broadcast(nodes: Nodes, blocks: Blocks) -> Rounds:
    """Broadcast to one rank of each node, then inside each node."""
    leaders = [node[0] for node in nodes]
    return [*tree_broadcast(leaders, blocks), *merge(*(tree_broadcast(node, blocks) for node in nodes))]


def hierarchical_scatter(nodes: Nodes) -> Rounds:
    """Scatter all parts of a node to one of its ranks, then inside each node."""
    leaders = [node[0] for node in nodes]
    inside = [tree_scatter(node, [(rank,) for rank in node]) for node in nodes]
    return [*tree_scatter(leaders, [tuple(node) for node in nodes]), *merge(*inside)]
