"""Collective times of a layout's groups on a cluster, in closed form: fast enough to price every layout.

A ring moves (n-1)/n of S through every link for an all-gather or a reduce-scatter, twice that for an all-reduce, and
pays one latency per step. `shoal.labs.collectives.price.price` finds the same for this ring, message by message. If a
group has L ranks in each of G nodes, its rings leave a node over L parallel adapters; the slowest link is the bound.
Two trees that share the links (Sanders, Speck & Traeff 2009), as in NCCL, do an all-reduce with the ring's volume in
fewer steps; the faster algorithm counts.

Messages from each rank to each other (all-to-all) cannot be forwarded like that: of S bytes of a rank, S (G-1)/G leave
its node, over its own share of the adapters. In a torus they cross the middle of each axis, of n places: a ring's links
there carry S n/8 each, a line's S n/4 (jax-ml/scaling-book, sharding). A message to the next rank uses one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd, inf
from operator import mul
from typing import Generic, TypeVar

import numpy as np

from shoal.spec.catalog.clusters import Cluster, Link
from shoal.spec.layout import AXES, EXPERT_AXES, Layout, mesh_axes

V = TypeVar("V", float, np.ndarray)


@dataclass(frozen=True)
class CommunicationGroup(Generic[V]):
    """A group of ranks that communicate; or many groups, with an array per field."""

    ranks: V  # number of ranks
    bandwidth: V  # one rank's share of the slowest link of the ring, bytes/s in one direction
    exchange: V  # bytes/s of data leaving a rank for all others in an all-to-all
    hop: V  # bytes/s of a message to the next rank, at the farthest such distance
    # gather_latency, sum_latency, exchange_latency, hop_latency: size-independent seconds of an all-gather or a
    # reduce-scatter, an all-reduce, an all-to-all, and a message to the next rank
    gather_latency: V
    sum_latency: V
    exchange_latency: V
    hop_latency: V

    @staticmethod
    def stack(groups: Sequence[CommunicationGroup[float]]) -> CommunicationGroup[np.ndarray]:
        names = [field.name for field in fields(CommunicationGroup)]
        return CommunicationGroup(*(np.array([[getattr(group, name)] for group in groups]) for name in names))

    def all_gather(self, size: V | float, count: V | float = 1) -> V:
        """Return the seconds of all-gathers with ``size`` bytes in total, in ``count`` sequential messages."""
        return count * self.gather_latency + (self.ranks - 1) / self.ranks * size / self.bandwidth

    reduce_scatter = all_gather

    def all_reduce(self, size: V | float, count: V | float = 1) -> V:
        """Return the seconds of ``count`` all-reduces with ``size`` bytes in total."""
        return count * self.sum_latency + 2 * (self.ranks - 1) / self.ranks * size / self.bandwidth

    def all_to_all(self, size: V | float) -> V:
        """Return the seconds in which every rank sends ``size`` bytes, to all other ranks together."""
        return self.exchange_latency + size / self.exchange

    def send(self, size: V | float) -> V:
        """Return the seconds of a message to the next rank."""
        return self.hop_latency + size / self.hop


def axis_extent(layout: Layout, axis: str) -> tuple[int, int]:
    """Return the number of ranks along one or several axes, and their distance."""
    axes = mesh_axes(layout, axis)
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


def ring_group(cluster: Cluster, ranks: int, stride: int = 1) -> CommunicationGroup[float]:
    """Return the group of every ``stride``-th accelerator, ``ranks`` of them, among equal groups of the others."""
    inside = cluster.inside
    if ranks == 1 or inside is None:
        return CommunicationGroup(ranks, inf, inf, inf, 0.0, 0.0, 0.0, 0.0)
    local = gcd(cluster.per_node // stride, ranks) if stride < cluster.per_node else 1
    if cluster.nic is None:
        local = ranks
    nodes = ranks // local
    near, near_exchange, near_steps = inside.bandwidth, inside.bandwidth, local - 1
    if cluster.torus:
        near, near_exchange, near_steps = _in_torus(cluster, inside, local, stride)
    bandwidth, exchange, hop = near, near_exchange, inside.bandwidth
    steps, latencies = (near_steps, 0), (inside.latency, 0.0)  # of the ring within nodes and between them
    through_memory = cluster.at_once is not None
    if nodes > 1 and cluster.nic is not None:
        share, through_memory = cluster.nics * cluster.nic.bandwidth / cluster.per_node, False
        if local == 1:
            near = near_exchange = inf
        bandwidth = min(local * share * (nodes / 2) ** -cluster.thin, near)
        exchange = (ranks - 1) / max((local - 1) / near_exchange, (ranks - local) / (share * cluster.all_to_all))
        hop = min(share, near)
        steps, latencies = (near_steps, nodes - 1), (inside.latency, cluster.nic.latency)
    ring, trees = (sum(map(mul, many, latencies)) for many in (steps, [step.bit_length() for step in steps]))
    sums = 2 * min(ring, trees)
    gathers = sums if through_memory else ring  # ranks read from all others: any collective takes as long as a sum
    return CommunicationGroup(ranks, bandwidth, exchange, hop, gathers, sums, ring, max(latencies))


def _in_torus(cluster: Cluster, link: Link, ranks: int, stride: int) -> tuple[float, float, int]:
    """Return the bandwidth, the exchange and the steps of a ring in a torus, as `CommunicationGroup` has them: along a
    full dimension with connected ends, else a path forth and back."""
    done, links, steps, fullest = 1, 0, 0, 0.0
    for size in reversed(cluster.torus):
        extent = min(done * size, stride * ranks) // max(done, stride)
        if extent > 1:
            ways = 2 if extent == size and cluster.closed(size) else 1
            links, steps = links + ways, steps + extent - 1
            # Traffic over the middle of the axis: from each position of one half to each of the other.
            fullest = max(fullest, (extent // 2) * (extent - extent // 2) / extent / ways)
        done *= size
    exchange = (ranks - 1) / ranks * link.bandwidth / fullest if fullest else link.bandwidth
    return max(1, links) * link.bandwidth, exchange, steps
