"""What collectives of a layout's groups take on a cluster, in closed form: fast enough to price every layout.

A ring moves (n-1)/n of S through every link for an all-gather or a reduce-scatter, twice that for an all-reduce, in as
many latencies as it has steps. That is what `shoal.labs.collectives.price.price` finds for the same ring, message by
message. Where a group has L ranks in each of G nodes, its rings leave a node over L adapters at once; the slowest link
decides. Two trees that share the links between them (Sanders, Speck & Traeff 2009), as NCCL has them, do an all-reduce
with the ring's volume in fewer steps; the faster one counts.

What each rank has for each other (all-to-all) cannot be passed on like that: of S bytes of a rank S (G-1)/G leave its
node, over its own share of the adapters. In a torus they cross the middle of each axis, of n places say: a ring's links
there carry S n/8 each, a line's S n/4 (jax-ml/scaling-book, sharding). A message to the next rank goes over one link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.links import Link
from shoal.spec.layout import AXES, EXPERT_AXES, Layout, axes_of


@dataclass(frozen=True)
class CommunicationGroup:
    """A group of ranks that communicate.

    Attributes:
        ranks: their number.
        bandwidth: of the slowest link of the ring, of one rank's share of it, bytes/s in one direction.
        exchange: bytes/s at which what a rank has for all others leaves it, where all exchange at once.
        hop: bytes/s of a message to the next rank, where that is farthest.
        inside, outside: steps of the ring within nodes and between them.
        latency, outer_latency: of each, s.
        through_memory: that all share, and in which each takes from all others at once: any collective has an
            all-reduce's latency.
    """

    ranks: int
    bandwidth: float = float("inf")
    exchange: float = float("inf")
    hop: float = float("inf")
    inside: int = 0
    outside: int = 0
    latency: float = 0.0
    outer_latency: float = 0.0
    through_memory: bool = False

    def all_gather(self, size: float, count: int = 1) -> float:
        """Seconds, for a whole of ``size`` bytes altogether, in ``count`` messages one after another."""
        steps = self.inside * self.latency + self.outside * self.outer_latency
        latency = self._summing if self.through_memory else steps
        return count * latency + (self.ranks - 1) / self.ranks * size / self.bandwidth

    reduce_scatter = all_gather

    def all_reduce(self, size: float, count: int = 1) -> float:
        """Seconds, for vectors of ``size`` bytes altogether, ``count`` of them."""
        return count * self._summing + 2 * (self.ranks - 1) / self.ranks * size / self.bandwidth

    @property
    def _summing(self) -> float:
        """Latencies of an all-reduce, by a ring or by trees."""
        ring = self.inside * self.latency + self.outside * self.outer_latency
        tree = self.inside.bit_length() * self.latency + self.outside.bit_length() * self.outer_latency
        return 2 * min(ring, tree)

    def all_to_all(self, size: float) -> float:
        """Seconds in which every rank sends ``size`` bytes, to all others together."""
        steps = self.inside * self.latency + self.outside * self.outer_latency
        return steps + size / self.exchange

    def send(self, size: float) -> float:
        """Seconds for a message to the next rank."""
        return max(self.latency, self.outer_latency) + size / self.hop


def group_of(layout: Layout, axis: str, cluster: Cluster) -> CommunicationGroup:
    """The ranks along an axis of the mesh, or along several (`axes_of`), on a cluster that they fill in order."""
    return ring_of(cluster, *extent_of(layout, axis))


def extent_of(layout: Layout, axis: str) -> tuple[int, int]:
    """How many ranks lie along an axis, or along several, and how far apart."""
    axes = axes_of(layout, axis)
    experts = bool(axes) and axes[0] in EXPERT_AXES[1:]
    order, sizes = (EXPERT_AXES, layout.expert_shape) if experts else (AXES, layout.shape)
    shape = dict(zip(order, sizes, strict=True))
    ranks = stride = 1
    for name in reversed(order):
        if name in axes:
            ranks *= shape[name]
        elif axes and order.index(name) > order.index(axes[-1]):
            stride *= shape[name]
    return ranks, stride


def ring_of(cluster: Cluster, ranks: int, stride: int = 1) -> CommunicationGroup:
    """Every ``stride``-th accelerator, ``ranks`` of them; those between do the same in groups of their own."""
    if ranks == 1 or cluster.inside is None:
        return CommunicationGroup(ranks)
    if cluster.torus:
        return _in_torus(cluster, cluster.inside, ranks, stride)
    here = gcd(cluster.per_node // stride, ranks) if stride < cluster.per_node else 1
    nodes = ranks // here
    inside = cluster.inside
    if nodes == 1 or cluster.nic is None:
        shared = cluster.at_once is not None
        wide = inside.bandwidth
        return CommunicationGroup(ranks, wide, wide, wide, ranks - 1, 0, inside.latency, through_memory=shared)
    share = cluster.nics * cluster.nic.bandwidth / cluster.per_node
    near = inside.bandwidth if here > 1 else float("inf")
    exchange = (ranks - 1) / max((here - 1) / near, (ranks - here) / share)
    bandwidth, hop = min(here * share * (nodes / 2) ** -cluster.thin, near), min(share, near)
    return CommunicationGroup(ranks, bandwidth, exchange, hop, here - 1, nodes - 1, inside.latency, cluster.nic.latency)


def _in_torus(cluster: Cluster, link: Link, ranks: int, stride: int) -> CommunicationGroup:
    """A group that fills a dimension goes round it both ways at once, where its ends are connected; else there and
    back."""
    done, links, steps, fullest = 1, 0, 0, 0.0
    for size in reversed(cluster.torus):
        extent = min(done * size, stride * ranks) // max(done, stride)
        if extent > 1:
            ways = 2 if extent == size and cluster.closed(size) else 1
            links, steps = links + ways, steps + extent - 1
            # Over the middle of the axis: from each of one half's places to each of the other's.
            fullest = max(fullest, (extent // 2) * (extent - extent // 2) / extent / ways)
        done *= size
    exchange = (ranks - 1) / ranks * link.bandwidth / fullest if fullest else link.bandwidth
    return CommunicationGroup(ranks, max(1, links) * link.bandwidth, exchange, link.bandwidth, steps, 0, link.latency)
