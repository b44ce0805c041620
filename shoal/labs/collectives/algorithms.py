"""The algorithms, as functions that return rounds of messages.

Each function takes the ranks in order, the root first if the collective has one. ``parts[i]`` are the blocks of the
rank at position i. A gather or reduce is the dual of a scatter or broadcast, a reduce-scatter of an all-gather. Rounds
may be empty: `textbook.describe` drops these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def shift(ranks: Ranks, distance: int, parts: Parts) -> list[Message]:
    """Return a round in which every rank sends its part to the rank ``distance`` positions further."""
    n = len(ranks)
    return [Message(ranks[i], ranks[(i + distance) % n], parts[i]) for i in range(n)]


# ---- scatter --------------------------------------------------------------------------------------------------------


def flat(ranks: Ranks, parts: Parts) -> Rounds:
    """The root sends each rank its part, one after another; in a broadcast each part is everything."""
    return [[Message(ranks[0], ranks[i], parts[i])] for i in range(1, len(ranks))]


def naive_all_reduce(ranks: Ranks) -> Rounds:
    """A flat reduce to each rank, one after another; block i is the copy of the vector that rank i sums."""
    pairs = ((source, root) for root in ranks for source in ranks if source != root)
    return [[Message(source, root, (root,), reduce=True)] for source, root in pairs]


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


def tree_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """A binomial tree: every round doubles the number of ranks with the data."""
    scatter = tree_scatter(ranks, [blocks] * len(ranks))
    return [[message._replace(blocks=blocks) for message in messages] for messages in scatter]


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
    rounds = [
        [
            Message(ranks[i], ranks[holders[p ^ distance]], join(held[p // distance * distance :][:distance]))
            for p, i in enumerate(holders)
        ]
        for distance in reversed(halves(len(holders)))
    ]
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


def halving_doubling_broadcast(ranks: Ranks, blocks: Blocks, *, reduce: bool = False) -> Rounds:
    """Scatter by a tree, then all-gather by recursive doubling (Thakur, Rabenseifner & Gropp 2005, 4.2).

    A reduce is the reverse: reduce-scatter by recursive halving, then gather by a tree (4.4).
    """
    holders, folded = fold(len(ranks))
    inner, parts = [ranks[i] for i in holders], split(blocks, len(holders))
    scatter = tree_scatter(inner, parts)
    gather = [*doubling_all_gather(inner, parts), [Message(ranks[i], ranks[i + 1], blocks) for i in folded]]
    return [*dual(gather, reduce=True), *dual(scatter)] if reduce else [*scatter, *gather]


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
    leave = [Message(ranks[i], ranks[i + 1], blocks) for i in folded]
    return [*dual([leave], reduce=True), *inner([ranks[i] for i in holders]), leave]


def split(blocks: Blocks, parts: int) -> list[Blocks]:
    """Split into equal consecutive parts."""
    each = len(blocks) // parts
    return [blocks[i * each : (i + 1) * each] for i in range(parts)]


# ---- all-to-all -----------------------------------------------------------------------------------------------------

Cargo = Callable[[int, int], Blocks]
"""Returns the blocks that go from one position to another."""


def pairwise(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Every rank sends to every other directly, to another one in each round.

    Pairs exchange if the ranks are a power of two; else the ranks `rotate`.
    """
    n = len(ranks)
    if n & (n - 1):
        return rotate(ranks, cargo)
    return [[Message(ranks[i], ranks[i ^ t], cargo(i, i ^ t)) for i in range(n)] for t in range(1, n)]


def rotate(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Every rank sends one position farther in each round."""
    n = len(ranks)
    return [shift(ranks, t, [cargo(i, (i + t) % n) for i in range(n)]) for t in range(1, n)]


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
    def inside(node: Ranks) -> Rounds:
        return rotate(node, lambda p, q: tuple(node[p] * ranks + to[q] for to in nodes))

    def between(rail: Ranks) -> Rounds:
        return rotate(rail, lambda i, j: tuple(source * ranks + rail[j] for source in nodes[i]))

    return [*merge(*map(inside, nodes)), *merge(*map(between, zip(*nodes, strict=True)))]
