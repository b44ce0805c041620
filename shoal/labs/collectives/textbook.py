"""The table: which algorithm there is for which collective, what it costs, and who described it.

A cost is written as in a textbook, in

    N   ranks                   L   ranks in a node             G   nodes, N / L
    P   the largest power of two that is at most N              F   1 if N is no power of two, else 0
    B   blocks of a pipeline    log log2, rounded up

and as the counts of a `Description`: rounds, volume (the largest message of each round, added up) and reduced (those
that are added at their target), both in units of S, the bytes of the largest input or output of one rank. In Hockney's
model the time is ``rounds alpha + volume S beta + reduced S gamma``. The tests evaluate each formula for every N and
compare it with the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.base.errors import UsageError, did_you_mean, nearest_divisors
from shoal.labs.collectives import hierarchical as inside_out
from shoal.labs.collectives.description import Collective, Description
from shoal.labs.collectives.rooted import (
    Blocks,
    Ranks,
    Rounds,
    dual,
    flat_broadcast,
    flat_scatter,
    join,
    ring_broadcast,
    ring_scatter,
    tree_broadcast,
    tree_scatter,
)
from shoal.labs.collectives.symmetric import (
    bruck_all_gather,
    bruck_all_to_all,
    doubling_all_gather,
    doubling_all_reduce,
    halving_doubling_all_reduce,
    halving_gather_reduce,
    pairwise_all_gather,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_to_all,
    ring_reduce_scatter,
    scatter_doubling_broadcast,
)


@dataclass(frozen=True)
class Setting:
    """What an algorithm is built for.

    Attributes:
        ranks: N.
        root: of a collective that has one.
        per_node: L, ranks in a node, for the hierarchical ones; consecutive ranks share a node.
        segments: B, the blocks of a pipelined chain.
    """

    ranks: int
    root: int = 0
    per_node: int = 1
    segments: int = 1

    @property
    def order(self) -> list[int]:
        """All ranks, the root first."""
        return [(self.root + i) % self.ranks for i in range(self.ranks)]

    @property
    def own(self) -> list[Blocks]:
        """The blocks of the ranks in that order, where each has the block of its number."""
        return [(rank,) for rank in self.order]

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node, the root's node and the root's place first."""
        places = [(self.root + i) % self.per_node for i in range(self.per_node)]
        count = self.ranks // self.per_node
        first = self.root // self.per_node
        return [[(first + i) % count * self.per_node + place for place in places] for i in range(count)]

    def cargo(self, i: int, j: int) -> Blocks:
        """The block of an all-to-all from one position of `order` to another."""
        return (self.order[i] * self.ranks + self.order[j],) if i != j else ()


Build = Callable[[Setting], tuple[int, Rounds]]
"""From the setting to the number of blocks and the rounds."""


@dataclass(frozen=True)
class Algorithm:
    """A way to do a collective.

    Attributes:
        build: its description.
        rounds: their number, as a formula.
        volume: the largest messages of the rounds, added up, in units of S.
        reduced: those of them that are added.
        bound: whether volume and reduced are exact for N = P alone, and upper bounds for other N.
    """

    build: Build
    rounds: str
    volume: str
    reduced: str = "0"
    bound: bool = False


def _whole(rounds: Rounds) -> tuple[int, Rounds]:
    """An algorithm that never cuts the vector."""
    return 1, rounds


def _cut(blocks: int, rounds: Callable[[Blocks], Rounds]) -> tuple[int, Rounds]:
    """An algorithm on a vector of so many blocks."""
    return blocks, rounds(tuple(range(blocks)))


def _dual_of(gather: Build) -> Build:
    """The reduce-scatter that is the dual of an all-gather."""
    def build(s: Setting) -> tuple[int, Rounds]:
        blocks, rounds = gather(s)
        return blocks, dual(rounds, reduce=True)

    return build


def _with_dual(gather: Build) -> Build:
    """The all-reduce that is the dual of an all-gather, and then the all-gather."""
    def build(s: Setting) -> tuple[int, Rounds]:
        blocks, rounds = gather(s)
        return blocks, [*dual(rounds, reduce=True), *rounds]

    return build


def _power(s: Setting) -> int:
    return 1 << s.ranks.bit_length() - 1


ONE = (0,)  # the blocks of a vector that is not cut

BROADCAST = {
    "flat": Algorithm(lambda s: (1, flat_broadcast(s.order, ONE)), "N - 1", "N - 1"),
    "tree": Algorithm(lambda s: (1, tree_broadcast(s.order, ONE)), "log(N)", "log(N)"),
    "ring": Algorithm(
        lambda s: _cut(s.segments, lambda blocks: ring_broadcast(s.order, blocks)), "B + N - 2", "(B + N - 2) / B"
    ),
    "halving-doubling": Algorithm(
        lambda s: _cut(_power(s), lambda blocks: scatter_doubling_broadcast(s.order, blocks)),
        "2 * log(P) + F",
        "2 * (P - 1) / P + F",
    ),
    "hierarchical": Algorithm(
        lambda s: (1, inside_out.broadcast(s.nodes, ONE)), "log(G) + log(L)", "log(G) + log(L)"
    ),
}

REDUCE = {
    "flat": Algorithm(lambda s: (1, dual(flat_broadcast(s.order, ONE), reduce=True)), "N - 1", "N - 1", "N - 1"),
    "tree": Algorithm(lambda s: (1, dual(tree_broadcast(s.order, ONE), reduce=True)), "log(N)", "log(N)", "log(N)"),
    "ring": Algorithm(
        lambda s: _cut(s.segments, lambda blocks: dual(ring_broadcast(s.order, blocks), reduce=True)),
        "B + N - 2",
        "(B + N - 2) / B",
        "(B + N - 2) / B",
    ),
    "halving-doubling": Algorithm(
        lambda s: _cut(_power(s), lambda blocks: halving_gather_reduce(s.order, blocks)),
        "2 * log(P) + F",
        "2 * (P - 1) / P + F",
        "(P - 1) / P + F",
    ),
    "hierarchical": Algorithm(
        lambda s: (1, dual(inside_out.broadcast(s.nodes, ONE), reduce=True)),
        "log(G) + log(L)",
        "log(G) + log(L)",
        "log(G) + log(L)",
    ),
}

SCATTER = {
    "flat": Algorithm(lambda s: (s.ranks, flat_scatter(s.order, s.own)), "N - 1", "(N - 1) / N"),
    "tree": Algorithm(lambda s: (s.ranks, tree_scatter(s.order, s.own)), "log(N)", "(N - 1) / N"),
    "ring": Algorithm(lambda s: (s.ranks, ring_scatter(s.order, s.own)), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(lambda s: (s.ranks, inside_out.scatter(s.nodes)), "log(G) + log(L)", "(N - 1) / N"),
}

GATHER = {
    "flat": Algorithm(lambda s: (s.ranks, dual(flat_scatter(s.order, s.own))), "N - 1", "(N - 1) / N"),
    "tree": Algorithm(lambda s: (s.ranks, dual(tree_scatter(s.order, s.own))), "log(N)", "(N - 1) / N"),
    "ring": Algorithm(lambda s: (s.ranks, dual(ring_scatter(s.order, s.own))), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(
        lambda s: (s.ranks, dual(inside_out.scatter(s.nodes))), "log(G) + log(L)", "(N - 1) / N"
    ),
}

ALL_GATHER = {
    "flat": Algorithm(
        lambda s: _cut(s.ranks, lambda blocks: [
            *dual(flat_scatter(s.order, s.own)), *flat_broadcast(s.order, blocks)
        ]),
        "2 * (N - 1)",
        "(N - 1) / N + N - 1",
    ),
    "tree": Algorithm(
        lambda s: _cut(s.ranks, lambda blocks: [
            *dual(tree_scatter(s.order, s.own)), *tree_broadcast(s.order, blocks)
        ]),
        "2 * log(N)",
        "(N - 1) / N + log(N)",
    ),
    "ring": Algorithm(lambda s: (s.ranks, ring_all_gather(s.order, s.own)), "N - 1", "(N - 1) / N"),
    "recursive-doubling": Algorithm(
        lambda s: (s.ranks, doubling_all_gather(s.order, s.own)),
        "log(P) + 2 * F",
        "(N - 1) / N + 7 * F / 5",
        bound=True,
    ),
    "bruck": Algorithm(lambda s: (s.ranks, bruck_all_gather(s.order, s.own)), "log(N)", "(N - 1) / N"),
    "pairwise": Algorithm(lambda s: (s.ranks, pairwise_all_gather(s.order, s.own)), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(lambda s: (s.ranks, inside_out.all_gather(s.nodes)), "G + L - 2", "(N - 1) / N"),
}

REDUCE_SCATTER = {
    "flat": Algorithm(
        lambda s: _cut(s.ranks, lambda blocks: [
            *dual(flat_broadcast(s.order, blocks), reduce=True), *flat_scatter(s.order, s.own)
        ]),
        "2 * (N - 1)",
        "N - 1 + (N - 1) / N",
        "N - 1",
    ),
    "tree": Algorithm(
        lambda s: _cut(s.ranks, lambda blocks: [
            *dual(tree_broadcast(s.order, blocks), reduce=True), *tree_scatter(s.order, s.own)
        ]),
        "2 * log(N)",
        "log(N) + (N - 1) / N",
        "log(N)",
    ),
    "ring": Algorithm(
        lambda s: (s.ranks, ring_reduce_scatter(s.order, s.own)), "N - 1", "(N - 1) / N", "(N - 1) / N"
    ),
    **{
        name: Algorithm(
            _dual_of(ALL_GATHER[gather].build),
            ALL_GATHER[gather].rounds,
            ALL_GATHER[gather].volume,
            ALL_GATHER[gather].volume,
            ALL_GATHER[gather].bound,
        )
        for name, gather in {
            "recursive-halving": "recursive-doubling",
            "bruck": "bruck",
            "pairwise": "pairwise",
            "hierarchical": "hierarchical",
        }.items()
    },
}

ALL_REDUCE = {
    "flat": Algorithm(
        lambda s: (1, [*dual(flat_broadcast(s.order, ONE), reduce=True), *flat_broadcast(s.order, ONE)]),
        "2 * (N - 1)",
        "2 * (N - 1)",
        "N - 1",
    ),
    "tree": Algorithm(
        lambda s: (1, [*dual(tree_broadcast(s.order, ONE), reduce=True), *tree_broadcast(s.order, ONE)]),
        "2 * log(N)",
        "2 * log(N)",
        "log(N)",
    ),
    "ring": Algorithm(
        lambda s: (s.ranks, [*ring_reduce_scatter(s.order, s.own), *ring_all_gather(s.order, s.own)]),
        "2 * (N - 1)",
        "2 * (N - 1) / N",
        "(N - 1) / N",
    ),
    "recursive-doubling": Algorithm(
        lambda s: (1, doubling_all_reduce(s.order, ONE)), "log(P) + 2 * F", "log(P) + 2 * F", "log(P) + F"
    ),
    "halving-doubling": Algorithm(
        lambda s: _cut(_power(s), lambda blocks: halving_doubling_all_reduce(s.order, blocks)),
        "2 * log(P) + 2 * F",
        "2 * (P - 1) / P + 2 * F",
        "(P - 1) / P + F",
    ),
    **{
        name: Algorithm(
            _with_dual(ALL_GATHER[name].build),
            f"2 * {rounds}",
            "2 * (N - 1) / N",
            "(N - 1) / N",
        )
        for name, rounds in {"bruck": "log(N)", "pairwise": "(N - 1)"}.items()
    },
    "hierarchical": Algorithm(
        lambda s: _cut(s.ranks, lambda blocks: inside_out.all_reduce(s.nodes, blocks)),
        "2 * (L - 1) + 2 * (G - 1)",
        "2 * (N - 1) / N",
        "(N - 1) / N",
    ),
}

ALL_TO_ALL = {
    "flat": Algorithm(
        lambda s: (s.ranks**2, _through_root(s, flat_scatter)), "2 * (N - 1)", "2 * (N - 1) * (N - 1) / N"
    ),
    "tree": Algorithm(
        lambda s: (s.ranks**2, _through_root(s, tree_scatter)), "2 * log(N)", "2 * (N - 1) * (N - 1) / N"
    ),
    "ring": Algorithm(lambda s: (s.ranks**2, ring_all_to_all(s.order, s.cargo)), "N - 1", "(N - 1) / 2"),
    "bruck": Algorithm(
        lambda s: (s.ranks**2, bruck_all_to_all(s.order, s.cargo)), "log(N)", "log(N) / 2", bound=True
    ),
    "pairwise": Algorithm(lambda s: (s.ranks**2, pairwise_all_to_all(s.order, s.cargo)), "N - 1", "(N - 1) / N"),
    "hierarchical": Algorithm(
        lambda s: (s.ranks**2, inside_out.all_to_all(s.nodes, s.ranks)), "L + G - 2", "(L - 1) / L + (G - 1) / G"
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


def _through_root(s: Setting, scatter: Callable[[Ranks, list[Blocks]], Rounds]) -> Rounds:
    """An all-to-all as a gather of all that goes out and a scatter of all that comes in."""
    everyone = range(s.ranks)
    outgoing = [join(s.cargo(i, j) for j in everyone) for i in everyone]
    incoming = [join(s.cargo(i, j) for i in everyone) for j in everyone]
    return [*dual(scatter(s.order, outgoing)), *scatter(s.order, incoming)]


def describe(
    collective: Collective | str,
    algorithm: str,
    ranks: int,
    *,
    root: int = 0,
    per_node: int = 1,
    segments: int | None = None,
) -> Description:
    """The description of a collective by an algorithm.

    Args:
        per_node: ranks in a node, for ``hierarchical``.
        segments: blocks of a pipelined chain (``ring`` broadcast and reduce); as many as ranks unless given.

    Raises:
        UsageError: there is no such collective or algorithm, the root is no rank, or nodes of that size do not fit.

    >>> ring = describe("all-reduce", "ring", 4)
    >>> len(ring.rounds), ring.volume
    (6, Fraction(3, 2))
    """
    if collective not in TEXTBOOK:
        raise UsageError(f"there is no collective '{collective}'; {did_you_mean(collective, TEXTBOOK)}")
    algorithms = TEXTBOOK[Collective(collective)]
    if algorithm not in algorithms:
        raise UsageError(f"{collective} has no algorithm '{algorithm}'; {did_you_mean(algorithm, algorithms)}")
    if ranks < 1:
        raise UsageError(f"{ranks} ranks; at least 1 is needed")
    if not 0 <= root < ranks:
        raise UsageError(f"root {root} is no rank of {ranks}; allowed: 0 to {ranks - 1}")
    if per_node < 1 or ranks % per_node:
        near = " or ".join(map(str, nearest_divisors(per_node, of=ranks)))
        raise UsageError(f"nodes of {per_node} ranks do not make {ranks} ranks; allowed near it: {near}")
    segments = ranks if segments is None else segments
    if segments < 1:
        raise UsageError(f"{segments} segments; at least 1 is needed")
    blocks, rounds = algorithms[algorithm].build(Setting(ranks, root, per_node, segments))
    return Description(
        Collective(collective), algorithm, ranks, root, blocks, tuple(tuple(messages) for messages in rounds)
    )
