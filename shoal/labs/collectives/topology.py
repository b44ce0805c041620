"""Networks: the links that a message from one rank to another crosses, and their latency and bandwidth.

Every link is directed. A message's latency is the sum over the links that it crosses; switches add none. Messages that
cross a link at the same time share its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from shoal.base.errors import UsageError, nearest_divisors

Edge = tuple[str, str]
"""The two ends, source first: ``rank 3``, ``node 0``, ``leaf 1``, ``spine``."""


@dataclass(frozen=True)
class Wire:
    """One directed link: latency of a message [s], bandwidth [bytes/s] and its name in tables."""

    latency: float
    bandwidth: float
    kind: str = "link"

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 1 / self.bandwidth


@dataclass(frozen=True)
class Topology:
    """A network of ranks.

    Attributes:
        route: returns the links from a source to another rank, in order.
        per_node: ranks of a node; 1 without nodes.
        out_of_node: bytes/s that a node can send to the others, if its ranks share the links out of it.
        gamma: seconds to add one byte to another (reduction).
    """

    name: str
    ranks: int
    wires: dict[Edge, Wire]
    route: Callable[[int, int], tuple[Edge, ...]]
    per_node: int = 1
    out_of_node: float = float("inf")
    gamma: float = 0.0

    @property
    def fastest(self) -> Wire:
        """The least latency and the largest bandwidth of the links on which messages leave a rank."""
        leaving = [wire for (source, _), wire in self.wires.items() if source.startswith("rank ") or " nic " in source]
        return Wire(
            min((wire.latency for wire in leaving), default=0.0),
            max((wire.bandwidth for wire in leaving), default=float("inf")),
        )


def fully_connected(ranks: int, wire: Wire, gamma: float = 0.0) -> Topology:
    """Build a network with a link from every rank to every other (Hockney's model)."""
    edges = {(f"rank {i}", f"rank {j}"): wire for i in range(ranks) for j in range(ranks) if i != j}
    return Topology("fully connected", ranks, edges, lambda i, j: ((f"rank {i}", f"rank {j}"),), gamma=gamma)


def ring(ranks: int, wire: Wire, gamma: float = 0.0) -> Topology:
    """Build a ring: a message takes the shorter way round, and the ascending one of two equal ones."""
    return replace(torus((ranks,), wire, gamma), name="ring")


def torus(shape: tuple[int, ...], wire: Wire, gamma: float = 0.0) -> Topology:
    """Build a grid whose rows and columns are rings, the last dimension varying fastest.

    A message goes along the last dimension first (dimension-ordered routing), the shorter way round.
    """
    ranks = prod(shape)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]

    def step(rank: int, d: int, by: int) -> int:
        at = rank // strides[d] % shape[d]
        return rank + ((at + by) % shape[d] - at) * strides[d]

    def route(source: int, target: int) -> tuple[Edge, ...]:
        edges = []
        for d in reversed(range(len(shape))):
            distance = (target // strides[d] - source // strides[d]) % shape[d]
            by = 1 if 2 * distance <= shape[d] else -1
            for _ in range(min(distance, shape[d] - distance)):
                after = step(source, d, by)
                edges.append((f"rank {source}", f"rank {after}"))
                source = after
        return tuple(edges)

    wires = {
        (f"rank {rank}", f"rank {step(rank, d, by)}"): wire
        for rank in range(ranks)
        for d in range(len(shape))
        for by in (1, -1)
        if shape[d] > 1
    }
    return Topology(f"torus {' x '.join(map(str, shape))}", ranks, wires, route, gamma=gamma)


def fat_tree(ranks: int, per_leaf: int, wire: Wire, oversubscription: float = 1.0, gamma: float = 0.0) -> Topology:
    """Build two levels of switches: ranks under leaf switches, whose trunks meet in a spine.

    Args:
        oversubscription: total bandwidth of a leaf's ranks over that of its trunk; 1 is a full fat tree.

    Raises:
        UsageError: the ranks do not divide into leaves, or the oversubscription is below 1.
    """
    _check_divides("--per-node", per_leaf, ranks)
    if oversubscription < 1:
        raise UsageError(f"--oversubscription {oversubscription:g}: must be at least 1 (a full fat tree)")
    trunk = Wire(0.0, per_leaf * wire.bandwidth / oversubscription, "trunk")
    wires: dict[Edge, Wire] = {}
    for rank in range(ranks):
        wires |= _both_ways(f"rank {rank}", f"leaf {rank // per_leaf}", wire)
    for leaf in range(ranks // per_leaf if ranks > per_leaf else 0):
        wires |= _both_ways(f"leaf {leaf}", "spine", trunk)

    def route(source: int, target: int) -> tuple[Edge, ...]:
        up, down = f"leaf {source // per_leaf}", f"leaf {target // per_leaf}"
        over = () if up == down else ((up, "spine"), ("spine", down))
        return ((f"rank {source}", up), *over, (down, f"rank {target}"))

    name = f"fat tree, {per_leaf} ranks to a leaf, {oversubscription:g}:1"
    return Topology(name, ranks, wires, route, per_leaf, trunk.bandwidth, gamma)


def islands(
    ranks: int, per_node: int, inside: Wire, nic: Wire, nics: int | None = None, gamma: float = 0.0
) -> Topology:
    """Build nodes whose ranks share a fast switch (an NVLink island) and network adapters.

    Args:
        nics: adapters of a node, each shared by the same number of its ranks (default: one for each rank).

    Raises:
        UsageError: the ranks do not divide into nodes, or the ranks of a node into adapters.
    """
    _check_divides("--per-node", per_node, ranks)
    nics = per_node if nics is None else nics
    _check_divides("--nics", nics, per_node)
    wires: dict[Edge, Wire] = {}
    for rank in range(ranks):
        wires |= _both_ways(f"rank {rank}", f"node {rank // per_node}", inside)

    def adapter(rank: int) -> str:
        return f"node {rank // per_node} nic {rank % per_node * nics // per_node}"

    for rank in range(ranks if ranks > per_node else 0):
        wires |= _both_ways(adapter(rank), "network", nic)

    def route(source: int, target: int) -> tuple[Edge, ...]:
        if source // per_node == target // per_node:
            node = f"node {source // per_node}"
            return ((f"rank {source}", node), (node, f"rank {target}"))
        return ((adapter(source), "network"), ("network", adapter(target)))

    name = f"islands of {per_node} with {nics} NICs"
    return Topology(name, ranks, wires, route, per_node, nics * nic.bandwidth, gamma)


def _both_ways(lower: str, upper: str, wire: Wire) -> dict[Edge, Wire]:
    return {(lower, upper): wire, (upper, lower): replace(wire, latency=0.0)}


def _check_divides(option: str, size: int, total: int) -> None:
    if size < 1 or total % size:
        near = " or ".join(map(str, nearest_divisors(size, of=total)))
        raise UsageError(f"{option} {size}: does not divide {total}; nearest allowed: {near}")
