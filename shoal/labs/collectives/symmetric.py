"""Collectives without a root: all-gather (its dual is reduce-scatter), all-reduce and all-to-all.

``parts[i]`` are the blocks of the rank at position i. Rounds may be empty: `textbook.describe` drops these.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.labs.collectives.description import Message
from shoal.labs.collectives.rooted import Blocks, Nodes, Parts, Ranks, Rounds, dual, halves, join, merge, tree_scatter


def shift(ranks: Ranks, distance: int, parts: Parts) -> list[Message]:
    """Return a round in which every rank sends its part to the rank ``distance`` positions further."""
    n = len(ranks)
    return [Message(ranks[i], ranks[(i + distance) % n], parts[i]) for i in range(n)]


# ---- all-gather -----------------------------------------------------------------------------------------------------


def ring_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Every rank forwards to the right what came from the left (Patarasuk & Yuan 2009)."""
    n = len(ranks)
    return [shift(ranks, 1, [parts[i - t] for i in range(n)]) for t in range(n - 1)]


def doubling_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Recursive doubling: exchange everything at distance 1, 2, 4, ... (Thakur, Rabenseifner & Gropp 2005, 4.1).

    Ranks beyond a power of two send their part to a neighbour before, and receive all others from it after.
    """
    holders, folded = fold(len(ranks))
    held = [join(parts[i : i + 1 + (i in folded)]) for i in holders]
    everything = join(parts)
    rounds: Rounds = []
    for distance in reversed(halves(len(holders))):
        groups = [join(held[p // distance * distance :][:distance]) for p in range(len(holders))]
        rounds.append([
            Message(ranks[holders[p]], ranks[holders[p ^ distance]], groups[p]) for p in range(len(holders))
        ])
    enter = [Message(ranks[i + 1], ranks[i], parts[i + 1]) for i in folded]
    leave = [
        Message(ranks[i], ranks[i + 1], tuple(b for b in everything if b not in parts[i + 1])) for i in folded
    ]
    return [enter, *rounds, leave]


def bruck_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Doubling on a circle, for any number of ranks (Bruck et al. 1997): send everything to the rank 2^k before."""
    n = len(ranks)
    rounds: Rounds = []
    for distance in reversed(halves(n)):
        sent = range(min(distance, n - distance))
        rounds.append(shift(ranks, -distance, [join(parts[(i + k) % n] for k in sent) for i in range(n)]))
    return rounds


def hierarchical_all_gather(nodes: Nodes) -> Rounds:
    """All-gather among ranks at the same position of each node, then the results of these inside each node."""
    rails = list(zip(*nodes, strict=True))
    between = [ring_all_gather(rail, [(rank,) for rank in rail]) for rail in rails]
    return [*merge(*between), *merge(*(ring_all_gather(node, rails) for node in nodes))]


# ---- all-reduce -----------------------------------------------------------------------------------------------------


def doubling_all_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Recursive doubling: exchange and add the full vector at distance 1, 2, 4, ..."""
    def inner(ranks: Ranks) -> Rounds:
        return [
            [Message(rank, ranks[p ^ distance], blocks, True) for p, rank in enumerate(ranks)]
            for distance in reversed(halves(len(ranks)))
        ]

    return _folded(ranks, blocks, inner)


def halving_doubling_all_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Recursive halving, then doubling (Rabenseifner; Thakur, Rabenseifner & Gropp 2005, 4.5).

    Each exchange halves what a rank must add; then the finished parts double.
    """
    def inner(ranks: Ranks) -> Rounds:
        gather = doubling_all_gather(ranks, split(blocks, len(ranks)))
        return [*dual(gather, reduce=True), *gather]

    return _folded(ranks, blocks, inner)


def hierarchical_all_reduce(nodes: Nodes, blocks: Blocks) -> Rounds:
    """Reduce-scatter inside nodes, all-reduce of the parts between nodes, all-gather inside nodes."""
    parts = split(blocks, len(nodes[0]))
    gather = merge(*(ring_all_gather(node, parts) for node in nodes))
    between = []
    for part, rail in zip(parts, zip(*nodes, strict=True), strict=True):
        ring = ring_all_gather(rail, split(part, len(rail)))
        between.append([*dual(ring, reduce=True), *ring])
    return [*dual(gather, reduce=True), *merge(*between), *gather]


def scatter_doubling_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Scatter by a tree, then all-gather by recursive doubling (Thakur, Rabenseifner & Gropp 2005, 4.2)."""
    holders, folded = fold(len(ranks))
    inner, parts = [ranks[i] for i in holders], split(blocks, len(holders))
    leave = [Message(ranks[i], ranks[i + 1], blocks) for i in folded]
    return [*tree_scatter(inner, parts), *doubling_all_gather(inner, parts), leave]


def halving_gather_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Reduce-scatter by recursive halving, then gather by a tree (Thakur, Rabenseifner & Gropp 2005, 4.4)."""
    holders, folded = fold(len(ranks))
    inner, parts = [ranks[i] for i in holders], split(blocks, len(holders))
    enter = [Message(ranks[i + 1], ranks[i], blocks, True) for i in folded]
    halving = dual(doubling_all_gather(inner, parts), reduce=True)
    return [enter, *halving, *dual(tree_scatter(inner, parts))]


def fold(n: int) -> tuple[list[int], list[int]]:
    """Return the power of two of n positions that do the work, and which of them also act for the next position.

    >>> fold(6)
    ([0, 2, 4, 5], [0, 2])
    """
    extra = n - (1 << n.bit_length() - 1)
    return [*range(0, 2 * extra, 2), *range(2 * extra, n)], list(range(0, 2 * extra, 2))


def _folded(ranks: Ranks, blocks: Blocks, inner: Callable[[Ranks], Rounds]) -> Rounds:
    """Return an all-reduce on a power of two of the ranks; the others send everything before and receive the result."""
    holders, folded = fold(len(ranks))
    enter = [Message(ranks[i + 1], ranks[i], blocks, True) for i in folded]
    leave = [Message(ranks[i], ranks[i + 1], blocks) for i in folded]
    return [enter, *inner([ranks[i] for i in holders]), leave]


def split(blocks: Blocks, parts: int) -> list[Blocks]:
    """Split into equal consecutive parts."""
    each = len(blocks) // parts
    return [blocks[i * each : (i + 1) * each] for i in range(parts)]


# ---- all-to-all -----------------------------------------------------------------------------------------------------

Cargo = Callable[[int, int], Blocks]
"""Returns the blocks that go from one position to another."""


def pairwise(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Every rank sends to every other directly, to another one in each round.

    Pairs exchange if the ranks are a power of two; else every rank sends one position farther in each round.
    """
    n = len(ranks)
    rounds = [[(i, i ^ t if n & (n - 1) == 0 else (i + t) % n) for i in range(n)] for t in range(1, n)]
    return [[Message(ranks[i], ranks[j], cargo(i, j)) for i, j in pairs] for pairs in rounds]


def ring_all_to_all(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Every rank forwards to the right all that came from the left and has not arrived."""
    n = len(ranks)
    rounds: Rounds = []
    for t in range(n - 1):
        first = [(i - t) % n for i in range(n)]  # the origin of the blocks that each rank forwards
        rounds.append(shift(ranks, 1, [join(cargo(i, (i + d) % n) for d in range(t + 1, n)) for i in first]))
    return rounds


def bruck_all_to_all(ranks: Ranks, cargo: Cargo) -> Rounds:
    """In round k all blocks whose distance has binary digit k move 2^k to the right (Bruck et al. 1997)."""
    n = len(ranks)
    rounds: Rounds = []
    for step in reversed(halves(n)):
        trips = [(d, d % step) for d in range(n) if d & step]  # the distance of a block, and how far it has come
        parts = [join(cargo((i - come) % n, (i - come + d) % n) for d, come in trips) for i in range(n)]
        rounds.append(shift(ranks, step, parts))
    return rounds


def hierarchical_all_to_all(nodes: Nodes, ranks: int) -> Rounds:
    """Send inside each node to the rank at the target's position, which then sends for its node."""
    places, inside, between = range(len(nodes[0])), [], []
    for shift in places[1:]:
        pairs = [(p, (p + shift) % len(places)) for p in places]
        inside.append([
            Message(node[p], node[q], tuple(node[p] * ranks + to[q] for to in nodes))
            for node in nodes
            for p, q in pairs
        ])
    for shift in range(1, len(nodes)):
        trips = [(node, nodes[(i + shift) % len(nodes)]) for i, node in enumerate(nodes)]
        between.append([
            Message(node[p], to[p], tuple(source * ranks + to[p] for source in node))
            for node, to in trips
            for p in places
        ])
    return [*inside, *between]
