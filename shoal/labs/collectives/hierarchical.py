"""Inside the nodes, then between them: the slow links between nodes carry only what they must.

``nodes`` are the ranks of each node, the root's node first and the root's place first in each. Inside and between,
the algorithms are trees where there is a root, and rings or pairs where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.labs.collectives.description import Message
from shoal.labs.collectives.rooted import Blocks, Ranks, Rounds, dual, together, tree_broadcast, tree_scatter
from shoal.labs.collectives.symmetric import ring_all_gather, split

Nodes = Sequence[Ranks]


def broadcast(nodes: Nodes, blocks: Blocks) -> Rounds:
    """To one rank of each node, and on inside."""
    leaders = [node[0] for node in nodes]
    return [*tree_broadcast(leaders, blocks), *together(*(tree_broadcast(node, blocks) for node in nodes))]


def scatter(nodes: Nodes) -> Rounds:
    """All parts of a node to one of its ranks, and on inside."""
    leaders = [node[0] for node in nodes]
    inside = [tree_scatter(node, [(rank,) for rank in node]) for node in nodes]
    return [*tree_scatter(leaders, [tuple(node) for node in nodes]), *together(*inside)]


def all_gather(nodes: Nodes) -> Rounds:
    """Among the ranks at the same place of each node, then inside each node what all of these have gathered."""
    rails = list(zip(*nodes, strict=True))
    between = [ring_all_gather(rail, [(rank,) for rank in rail]) for rail in rails]
    return [*together(*between), *together(*(ring_all_gather(node, rails) for node in nodes))]


def all_reduce(nodes: Nodes, blocks: Blocks) -> Rounds:
    """Reduce-scatter inside, all-reduce of the parts between, all-gather inside."""
    parts = split(blocks, len(nodes[0]))
    gather = together(*(ring_all_gather(node, parts) for node in nodes))
    between = []
    for part, rail in zip(parts, zip(*nodes, strict=True), strict=True):
        ring = ring_all_gather(rail, split(part, len(rail)))
        between.append([*dual(ring, reduce=True), *ring])
    return [*dual(gather, reduce=True), *together(*between), *gather]


def all_to_all(nodes: Nodes, ranks: int) -> Rounds:
    """Inside each node to the rank at the target's place, which then sends for its whole node."""
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
