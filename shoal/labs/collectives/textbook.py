"""The table of algorithms for each collective, with their costs.

A cost is a formula in

    N   ranks                   L   ranks in a node             G   nodes, N / L
    P   the largest power of two that is at most N              F   1 if N is no power of two, else 0
    B   blocks of a pipeline    log log2, rounded up

for the counts of a `Description`: rounds, volume (sum over rounds of the largest message) and reduced (the same for
messages that are added at their target), both in units of S, the bytes of the largest input or output of one rank. In
Hockney's model the time is ``rounds alpha + volume S beta + reduced S gamma``. The tests compare each formula with the
counts for many N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.base.errors import UsageError, did_you_mean, nearest_divisors
from shoal.labs.collectives import algorithms
from shoal.labs.collectives.algorithms import Blocks, Parts, Ranks, Rounds, dual, join
from shoal.labs.collectives.description import VECTORS, Collective, Description


@dataclass(frozen=True)
class Setting:
    """What an algorithm is built for: the ranks, the root, the ranks of a node (consecutive ones) and the blocks."""

    ranks: int
    root: int
    per_node: int
    blocks: Blocks

    @property
    def order(self) -> list[int]:
        """All ranks, the root first."""
        return [(self.root + i) % self.ranks for i in range(self.ranks)]

    @property
    def own(self) -> list[Blocks]:
        """The blocks of the ranks in that order, if rank i has block i."""
        return [(rank,) for rank in self.order]

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node, the root's node and the root's position first."""
        places = [(self.root + i) % self.per_node for i in range(self.per_node)]
        count = self.ranks // self.per_node
        first = self.root // self.per_node
        return [[(first + i) % count * self.per_node + place for place in places] for i in range(count)]

    def cargo(self, i: int, j: int) -> Blocks:
        """Return the block of an all-to-all from one position of `order` to another."""
        return (self.order[i] * self.ranks + self.order[j],) if i != j else ()


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a collective.

    Attributes:
        build: returns the rounds.
        rounds, volume, reduced: formulas of the costs.
        cut: number of blocks of the vector of a broadcast, reduce or all-reduce: 1, B, P or N; or "copies": N copies.
        bound: whether volume and reduced are exact for N = P alone, and upper bounds for other N.
    """

    build: Callable[[Setting], Rounds]
    rounds: str
    volume: str
    reduced: str = "0"
    cut: str = "1"
    bound: bool = False


def _dual(algorithm: Algorithm, *, reduce: bool = False) -> Algorithm:
    """Return the gather, reduce or reduce-scatter that is the dual of a scatter, broadcast or all-gather."""
    reduced = algorithm.volume if reduce else "0"
    return replace(algorithm, build=lambda s: dual(algorithm.build(s), reduce=reduce), reduced=reduced)


def _chain(first: Algorithm, second: Algorithm, rounds: str, volume: str, reduced: str, cut: str = "1") -> Algorithm:
    return Algorithm(lambda s: [*first.build(s), *second.build(s)], rounds, volume, reduced, cut)


def _through_root(s: Setting, scatter: Callable[[Ranks, Parts], Rounds]) -> Rounds:
    """Return an all-to-all as a gather of everything sent and a scatter of everything received."""
    everyone = range(s.ranks)
    outgoing = [join(s.cargo(i, j) for j in everyone) for i in everyone]
    incoming = [join(s.cargo(i, j) for i in everyone) for j in everyone]
    return [*dual(scatter(s.order, outgoing)), *scatter(s.order, incoming)]


BROADCAST = {
    "flat": Algorithm(lambda s: algorithms.flat(s.order, [s.blocks] * s.ranks), "N - 1", "N - 1"),
    "tree": Algorithm(lambda s: algorithms.tree_broadcast(s.order, s.blocks), "log(N)", "log(N)"),
    "ring": Algorithm(lambda s: algorithms.ring_broadcast(s.order, s.blocks), "B + N - 2", "(B + N - 2) / B", cut="B"),
    "halving-doubling": Algorithm(
        lambda s: algorithms.halving_doubling_broadcast(s.order, s.blocks),
        "2 * log(P) + F", "2 * (P - 1) / P + F", cut="P",
    ),
    "hierarchical": Algorithm(
        lambda s: algorithms.hierarchical_broadcast(s.nodes, s.blocks), "log(G) + log(L)", "log(G) + log(L)"
    ),
}  # fmt: skip

REDUCE = {name: _dual(algorithm, reduce=True) for name, algorithm in BROADCAST.items()} | {
    "halving-doubling": Algorithm(
        lambda s: algorithms.halving_doubling_broadcast(s.order, s.blocks, reduce=True),
        "2 * log(P) + F", "2 * (P - 1) / P + F", "(P - 1) / P + F", cut="P",
    )
}  # fmt: skip

SCATTER = {
    "flat": Algorithm(lambda s: algorithms.flat(s.order, s.own), "N - 1", "(N - 1) / N"),
    "tree": Algorithm(lambda s: algorithms.tree_scatter(s.order, s.own), "log(N)", "(N - 1) / N"),
    "ring": Algorithm(lambda s: algorithms.ring_scatter(s.order, s.own), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(lambda s: algorithms.hierarchical_scatter(s.nodes), "log(G) + log(L)", "(N - 1) / N"),
}

GATHER = {name: _dual(algorithm) for name, algorithm in SCATTER.items()}

ALL_GATHER = {
    "flat": _chain(GATHER["flat"], BROADCAST["flat"], "2 * (N - 1)", "(N - 1) / N + N - 1", "0"),
    "tree": _chain(GATHER["tree"], BROADCAST["tree"], "2 * log(N)", "(N - 1) / N + log(N)", "0"),
    "ring": Algorithm(lambda s: algorithms.ring_all_gather(s.order, s.own), "N - 1", "(N - 1) / N"),
    "recursive-doubling": Algorithm(
        lambda s: algorithms.doubling_all_gather(s.order, s.own),
        "log(P) + 2 * F", "(N - 1) / N + 7 * F / 5", bound=True,
    ),
    "bruck": Algorithm(lambda s: algorithms.bruck_all_gather(s.order, s.own), "log(N)", "(N - 1) / N"),
    "pairwise": Algorithm(lambda s: algorithms.pairwise(s.order, lambda i, _: s.own[i]), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(lambda s: algorithms.hierarchical_all_gather(s.nodes), "G + L - 2", "(N - 1) / N"),
}  # fmt: skip

REDUCE_SCATTER = {
    "flat": _chain(REDUCE["flat"], SCATTER["flat"], "2 * (N - 1)", "N - 1 + (N - 1) / N", "N - 1"),
    "tree": _chain(REDUCE["tree"], SCATTER["tree"], "2 * log(N)", "log(N) + (N - 1) / N", "log(N)"),
    "ring": Algorithm(  # the dual of a ring to the left, so that messages go to the right
        lambda s: dual(algorithms.ring_all_gather(s.order[::-1], s.own[::-1]), reduce=True),
        "N - 1", "(N - 1) / N", "(N - 1) / N",
    ),
    "recursive-halving": _dual(ALL_GATHER["recursive-doubling"], reduce=True),
    **{name: _dual(ALL_GATHER[name], reduce=True) for name in ("bruck", "pairwise", "hierarchical")},
}  # fmt: skip

ALL_REDUCE = {
    "flat": _chain(REDUCE["flat"], BROADCAST["flat"], "2 * (N - 1)", "2 * (N - 1)", "N - 1"),
    "tree": _chain(REDUCE["tree"], BROADCAST["tree"], "2 * log(N)", "2 * log(N)", "log(N)"),
    "ring": _chain(
        REDUCE_SCATTER["ring"], ALL_GATHER["ring"], "2 * (N - 1)", "2 * (N - 1) / N", "(N - 1) / N", cut="N"
    ),
    "recursive-doubling": Algorithm(
        lambda s: algorithms.doubling_all_reduce(s.order, s.blocks), "log(P) + 2 * F", "log(P) + 2 * F", "log(P) + F"
    ),
    "halving-doubling": Algorithm(
        lambda s: algorithms.halving_doubling_all_reduce(s.order, s.blocks),
        "2 * log(P) + 2 * F", "2 * (P - 1) / P + 2 * F", "(P - 1) / P + F", cut="P",
    ),
    **{
        name: _chain(REDUCE_SCATTER[name], ALL_GATHER[name], rounds, "2 * (N - 1) / N", "(N - 1) / N", cut="N")
        for name, rounds in {"bruck": "2 * log(N)", "pairwise": "2 * (N - 1)"}.items()
    },
    "hierarchical": Algorithm(
        lambda s: algorithms.hierarchical_all_reduce(s.nodes, s.blocks),
        "2 * (L - 1) + 2 * (G - 1)", "2 * (N - 1) / N", "(N - 1) / N", cut="N",
    ),
    "naive": Algorithm(
        lambda s: algorithms.naive_all_reduce(s.order), "N * (N - 1)", "N * (N - 1)", "N * (N - 1)", cut="copies"
    ),
}  # fmt: skip

ALL_TO_ALL = {
    "flat": Algorithm(lambda s: _through_root(s, algorithms.flat), "2 * (N - 1)", "2 * (N - 1) * (N - 1) / N"),
    "tree": Algorithm(lambda s: _through_root(s, algorithms.tree_scatter), "2 * log(N)", "2 * (N - 1) * (N - 1) / N"),
    "ring": Algorithm(lambda s: algorithms.ring_all_to_all(s.order, s.cargo), "N - 1", "(N - 1) / 2"),
    "bruck": Algorithm(lambda s: algorithms.bruck_all_to_all(s.order, s.cargo), "log(N)", "log(N) / 2", bound=True),
    "pairwise": Algorithm(lambda s: algorithms.pairwise(s.order, s.cargo), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(
        lambda s: algorithms.hierarchical_all_to_all(s.nodes, s.ranks), "L + G - 2", "(L - 1) / L + (G - 1) / G"
    ),
}

TEXTBOOK: dict[Collective, dict[str, Algorithm]] = {
    Collective.BROADCAST: BROADCAST,
    Collective.REDUCE: REDUCE,
    Collective.SCATTER: SCATTER,
    Collective.GATHER: GATHER,
    Collective.ALL_GATHER: ALL_GATHER,
    Collective.REDUCE_SCATTER: REDUCE_SCATTER,
    Collective.ALL_REDUCE: ALL_REDUCE,
    Collective.ALL_TO_ALL: ALL_TO_ALL,
}


def describe(
    collective: Collective | str, algorithm: str, ranks: int, *, root: int = 0, per_node: int = 1,
    segments: int | None = None,
) -> Description:  # fmt: skip
    """Describe a collective by an algorithm.

    Args:
        per_node: ranks in a node, for ``hierarchical``.
        segments: blocks of a pipelined chain (``ring`` broadcast and reduce; default: the number of ranks).

    Raises:
        UsageError: unknown collective or algorithm, a root that is no rank, or nodes that do not divide the ranks.

    >>> ring = describe("all-reduce", "ring", 4)
    >>> len(ring.rounds), ring.volume
    (6, Fraction(3, 2))
    """
    if collective not in TEXTBOOK:
        raise UsageError(f"unknown collective '{collective}'; {did_you_mean(collective, TEXTBOOK)}")
    known = TEXTBOOK[Collective(collective)]
    if algorithm not in known:
        raise UsageError(f"{collective} has no algorithm '{algorithm}'; {did_you_mean(algorithm, known)}")
    if ranks < 1:
        raise UsageError(f"{ranks} ranks; at least 1 is needed")
    if not 0 <= root < ranks:
        raise UsageError(f"root {root} is no rank of {ranks}; allowed: 0 to {ranks - 1}")
    if per_node < 1 or ranks % per_node:
        near = " or ".join(map(str, nearest_divisors(per_node, of=ranks)))
        raise UsageError(f"nodes of {per_node} ranks do not divide {ranks} ranks; nearest allowed: {near}")
    segments = ranks if segments is None else segments
    if segments < 1:
        raise UsageError(f"{segments} segments; at least 1 is needed")
    found = known[algorithm]
    if collective in VECTORS:
        blocks = {"1": 1, "B": segments, "P": 1 << ranks.bit_length() - 1}.get(found.cut, ranks)
    else:
        blocks = ranks**2 if collective == Collective.ALL_TO_ALL else ranks
    built = found.build(Setting(ranks, root, per_node, tuple(range(blocks))))
    rounds = tuple(tuple(messages) for messages in built if messages)
    return Description(Collective(collective), algorithm, ranks, root, blocks, rounds, found.cut == "copies")
