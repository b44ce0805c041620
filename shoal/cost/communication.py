"""What collectives of a layout's groups take on a cluster, in closed form: fast enough to price every layout.

A ring moves (n-1)/n of S through every link for an all-gather or a reduce-scatter, twice that for an all-reduce, in as
many latencies as it has steps. That is what `shoal.cost.collectives.price` finds for the same ring, message by message.
Where a group has L ranks in each of G nodes, its rings leave a node over L adapters at once; the slowest link decides.
Two trees that share the links between them (Sanders, Speck & Traeff 2009), as NCCL has them, do an all-reduce with the
ring's volume in fewer steps; the faster one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from shoal.catalog.clusters import Cluster
from shoal.layout import AXES, EXPERT_AXES, Layout, axes_of


@dataclass(frozen=True)
class Ring:
    """A group of ranks that communicate.

    Attributes:
        ranks: their number.
        bandwidth: of the slowest link of the ring, of one rank's share of it, bytes/s in one direction.
        inside, outside: steps of the ring within nodes and between them.
        latency, outer_latency: of each, s.
    """

    ranks: int
    bandwidth: float = float("inf")
    inside: int = 0
    outside: int = 0
    latency: float = 0.0
    outer_latency: float = 0.0

    def all_gather(self, size: float) -> float:
        """Seconds, for a whole of ``size`` bytes."""
        steps = self.inside * self.latency + self.outside * self.outer_latency
        return steps + (self.ranks - 1) / self.ranks * size / self.bandwidth

    reduce_scatter = all_gather

    def all_reduce(self, size: float) -> float:
        """Seconds, for a vector of ``size`` bytes."""
        steps = self.inside * self.latency + self.outside * self.outer_latency
        tree = self.inside.bit_length() * self.latency + self.outside.bit_length() * self.outer_latency
        return 2 * min(steps, tree) + 2 * (self.ranks - 1) / self.ranks * size / self.bandwidth

    def all_to_all(self, size: float) -> float:
        """Seconds in which every rank sends ``size`` bytes, to all others together."""
        steps = self.inside * self.latency + self.outside * self.outer_latency
        return steps + size / self.bandwidth

    def send(self, size: float) -> float:
        """Seconds for a message to the next rank."""
        return max(self.latency, self.outer_latency) + size / self.bandwidth


def group_of(layout: Layout, axis: str, cluster: Cluster) -> Ring:
    """The ranks along an axis of the mesh, or along several (`axes_of`), on a cluster that they fill in order."""
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
    return ring_of(cluster, ranks, stride)


def ring_of(cluster: Cluster, ranks: int, stride: int = 1) -> Ring:
    """Every ``stride``-th accelerator, ``ranks`` of them; those between do the same in groups of their own."""
    if ranks == 1 or cluster.inside is None:
        return Ring(ranks)
    if cluster.torus:
        return _in_torus(cluster, ranks, stride)
    here = gcd(cluster.per_node // stride, ranks) if stride < cluster.per_node else 1
    nodes = ranks // here
    inside = cluster.inside
    if nodes == 1 or cluster.nic is None:
        return Ring(ranks, inside.bandwidth, ranks - 1, 0, inside.latency)
    share = cluster.nics * cluster.nic.bandwidth / cluster.per_node
    bandwidth = min(here * share, inside.bandwidth if here > 1 else float("inf"))
    return Ring(ranks, bandwidth, here - 1, nodes - 1, inside.latency, cluster.nic.latency)


def _in_torus(cluster: Cluster, ranks: int, stride: int) -> Ring:
    """A group that fills a dimension goes round it both ways at once; one that fills a part of it, there and back."""
    done, links, steps = 1, 0, 0
    for size in reversed(cluster.torus):
        extent = min(done * size, stride * ranks) // max(done, stride)
        if extent > 1:
            links += 2 if extent == size else 1
            steps += extent - 1
        done *= size
    return Ring(ranks, max(1, links) * cluster.inside.bandwidth, steps, 0, cluster.inside.latency)
