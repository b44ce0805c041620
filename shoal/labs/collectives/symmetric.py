"""No root: all-gather (its dual is reduce-scatter), all-reduce, all-to-all.

``parts[i]`` are the blocks of the rank at position i.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.labs.collectives.description import Message
from shoal.labs.collectives.rooted import Blocks, Parts, Ranks, Rounds, dual, halves, join, tree_scatter

# ---- all-gather -----------------------------------------------------------------------------------------------------


def ring_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Everyone passes to the right what came from the left (Patarasuk & Yuan 2009)."""
    n = len(ranks)
    return [[Message(ranks[i], ranks[(i + 1) % n], parts[(i - t) % n]) for i in range(n)] for t in range(n - 1)]


def ring_reduce_scatter(ranks: Ranks, parts: Parts) -> Rounds:
    """Everyone adds what came from the left and passes it to the right (the dual of a ring that runs to the left)."""
    return dual(ring_all_gather(ranks[::-1], parts[::-1]), reduce=True)


def pairwise_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Everyone sends its own part to every other, a different one in each round."""
    return [
        [Message(ranks[i], ranks[j], parts[i]) for i, j in enumerate(partners)] for partners in pairings(len(ranks))
    ]


def doubling_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Recursive doubling: exchange all one has at distance 1, 2, 4, ... (Thakur, Rabenseifner & Gropp 2005, 4.1).

    Ranks beyond a power of two hand their part to a neighbour before, and get all others from it after.
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
    if not folded:
        return rounds
    enter = [Message(ranks[i + 1], ranks[i], parts[i + 1]) for i in folded]
    leave = [
        Message(ranks[i], ranks[i + 1], tuple(b for b in everything if b not in parts[i + 1])) for i in folded
    ]
    return [enter, *rounds, leave]


def bruck_all_gather(ranks: Ranks, parts: Parts) -> Rounds:
    """Doubling on a circle, for any number of ranks (Bruck et al. 1997): what one has goes to the rank 2^k before."""
    n = len(ranks)
    rounds: Rounds = []
    for distance in reversed(halves(n)):
        count = min(distance, n - distance)
        rounds.append([
            Message(ranks[i], ranks[i - distance], join(parts[(i + k) % n] for k in range(count))) for i in range(n)
        ])
    return rounds


# ---- all-reduce -----------------------------------------------------------------------------------------------------


def doubling_all_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Recursive doubling: exchange and add the whole vector at distance 1, 2, 4, ..."""
    def inner(ranks: Ranks) -> Rounds:
        return [
            [Message(rank, ranks[p ^ distance], blocks, True) for p, rank in enumerate(ranks)]
            for distance in reversed(halves(len(ranks)))
        ]

    return _folded(ranks, blocks, inner)


def halving_doubling_all_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Recursive halving, then doubling (Rabenseifner; Thakur, Rabenseifner & Gropp 2005, 4.5).

    Each exchange halves what a rank has to add; then the finished parts double.
    """
    def inner(ranks: Ranks) -> Rounds:
        gather = doubling_all_gather(ranks, split(blocks, len(ranks)))
        return [*dual(gather, reduce=True), *gather]

    return _folded(ranks, blocks, inner)


def scatter_doubling_broadcast(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Scatter by a tree, then all-gather by recursive doubling (Thakur, Rabenseifner & Gropp 2005, 4.2)."""
    holders, folded = fold(len(ranks))
    inner, parts = [ranks[i] for i in holders], split(blocks, len(holders))
    leave = [Message(ranks[i], ranks[i + 1], blocks) for i in folded]
    return [*tree_scatter(inner, parts), *doubling_all_gather(inner, parts), *([leave] if leave else [])]


def halving_gather_reduce(ranks: Ranks, blocks: Blocks) -> Rounds:
    """Reduce-scatter by recursive halving, then gather by a tree (Thakur, Rabenseifner & Gropp 2005, 4.4)."""
    holders, folded = fold(len(ranks))
    inner, parts = [ranks[i] for i in holders], split(blocks, len(holders))
    enter = [Message(ranks[i + 1], ranks[i], blocks, True) for i in folded]
    halving = dual(doubling_all_gather(inner, parts), reduce=True)
    return [*([enter] if enter else []), *halving, *dual(tree_scatter(inner, parts))]


def fold(n: int) -> tuple[list[int], list[int]]:
    """A power of two of n positions that do the work, and those among them that stand in for the next one as well.

    >>> fold(6)
    ([0, 2, 4, 5], [0, 2])
    """
    extra = n - (1 << n.bit_length() - 1)
    return [*range(0, 2 * extra, 2), *range(2 * extra, n)], list(range(0, 2 * extra, 2))


def _folded(ranks: Ranks, blocks: Blocks, inner: Callable[[Ranks], Rounds]) -> Rounds:
    """An all-reduce on a power of two of the ranks; the others hand in all before, and get all after."""
    holders, folded = fold(len(ranks))
    rounds = inner([ranks[i] for i in holders])
    if not folded:
        return rounds
    enter = [Message(ranks[i + 1], ranks[i], blocks, True) for i in folded]
    leave = [Message(ranks[i], ranks[i + 1], blocks) for i in folded]
    return [enter, *rounds, leave]


def split(blocks: Blocks, parts: int) -> list[Blocks]:
    """Equal consecutive parts."""
    each = len(blocks) // parts
    return [blocks[i * each : (i + 1) * each] for i in range(parts)]


def pairings(n: int) -> list[list[int]]:
    """n - 1 rounds in which everyone meets everyone: pairs if n is a power of two, else a shift by one more each time.

    >>> pairings(4)
    [[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
    >>> pairings(3)
    [[1, 2, 0], [2, 0, 1]]
    """
    exchange = n & (n - 1) == 0
    return [[i ^ t if exchange else (i + t) % n for i in range(n)] for t in range(1, n)]


# ---- all-to-all -----------------------------------------------------------------------------------------------------

Cargo = Callable[[int, int], Blocks]
"""The blocks that go from one position to another."""


def pairwise_all_to_all(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Everyone sends to every other directly, a different one in each round."""
    return [
        [Message(ranks[i], ranks[j], cargo(i, j)) for i, j in enumerate(partners)] for partners in pairings(len(ranks))
    ]


def ring_all_to_all(ranks: Ranks, cargo: Cargo) -> Rounds:
    """Everyone passes to the right all that came from the left and has not arrived."""
    n = len(ranks)
    return [
        [
            Message(ranks[i], ranks[(i + 1) % n], join(cargo((i - t) % n, (i - t + d) % n) for d in range(t + 1, n)))
            for i in range(n)
        ]
        for t in range(n - 1)
    ]


def bruck_all_to_all(ranks: Ranks, cargo: Cargo) -> Rounds:
    """In round k all blocks move 2^k to the right whose way has that binary digit (Bruck et al. 1997)."""
    n = len(ranks)
    return [
        [
            Message(
                ranks[i],
                ranks[(i + step) % n],
                join(cargo((i - d % step) % n, (i - d % step + d) % n) for d in range(n) if d & step),
            )
            for i in range(n)
        ]
        for step in reversed(halves(n))
    ]
