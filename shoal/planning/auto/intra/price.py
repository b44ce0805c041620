"""Prices of moves and of operators on a mesh of a cluster, by the cost model of `shoal.planning.cost`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.engine.sharding.graph import VIEWS, Operator
from shoal.engine.sharding.moves import ALL_TO_ALL, Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding
from shoal.planning.auto.moves import MoveSearch, Network, Path
from shoal.planning.cost.roofline import OperationCost
from shoal.planning.cost.time.communication import ring_group
from shoal.planning.cost.time.engine_layer import attained, memory_rate, product_rate
from shoal.planning.run import KINDS
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.number_formats import Formats


@dataclass(frozen=True)
class ClusterNetwork:
    """The network of a cluster, at attained bandwidths, under a mesh of its devices in order from a node's first on.

    Collectives along an axis use rings, as `shoal estimate` prices them.
    """

    mesh: NamedMesh
    cluster: Cluster

    def price(self, collective: str, axes: str, size: float) -> tuple[float, str]:
        inner = max(self.mesh.axes.index(axis) for axis in axes)
        ring = ring_group(self.cluster, self.mesh.size(axes), math.prod(self.mesh.shape[inner + 1 :]))
        if collective == ALL_TO_ALL:
            return ring.all_to_all(size * (ring.ranks - 1) / ring.ranks), "pairwise"
        return getattr(ring, collective.replace("-", "_"))(size), "ring"


@dataclass
class Prices:
    """Seconds and bytes of one device."""

    mesh: NamedMesh
    network: Network
    peak: float  # FLOP/s that a device attains in products of large matrices
    bandwidth: float  # bytes/s that it attains of its memory
    itemsize: int  # bytes of a floating-point number
    gradient_bytes: float  # of an element of a parameter's gradient
    state_bytes: float  # of an element's optimizer states, a master copy of the weight included
    _searches: dict[tuple[tuple[int, ...], int], MoveSearch] = field(default_factory=dict)
    _reached: dict[tuple[tuple[int, ...], int, Sharding], dict[Sharding, Path]] = field(default_factory=dict)

    @staticmethod
    def on(cluster: Cluster, mesh: NamedMesh, formats: Formats) -> Prices:
        """Make the prices of training with AdamW on a mesh of a cluster."""
        peak = product_rate(cluster, KINDS[formats.compute.name]) / cluster.turns
        master = formats.storage.itemsize if formats.master else 0
        return Prices(
            mesh, ClusterNetwork(mesh, attained(cluster)), peak, memory_rate(cluster), formats.compute.itemsize,
            formats.reduce.itemsize, 2 * formats.state.itemsize + master,
        )  # fmt: skip

    def get_itemsize(self, op: Operator) -> int:
        """Return the bytes of an element of an operator's output."""
        return self.itemsize if op.dtype.is_floating_point else op.dtype.itemsize

    def local_numel(self, op: Operator, sharding: Sharding) -> float:
        return op.numel / self.mesh.size("".join(axes for _, axes in sharding.dims))

    def local_bytes(self, op: Operator, sharding: Sharding) -> float:
        return self.local_numel(op, sharding) * self.get_itemsize(op)

    def move(self, op: Operator, before: Sharding, after: Sharding) -> float:
        """Return the seconds of the cheapest moves of a tensor; infinite if no moves lead there."""
        if before == after:
            return 0.0
        path = self._reach(op, before).get(after)
        return math.inf if path is None else path.cost

    def moves(self, op: Operator, before: Sharding, after: Sharding) -> tuple[Move, ...]:
        return self._reach(op, before)[after].moves

    def work(self, op: Operator, flops: float, operands: list[tuple[Operator, Sharding]], made: Sharding) -> float:
        """Return the seconds of one device's part of an operator: the longer of its FLOPs and its memory traffic."""
        if op.op in VIEWS or op.op == "getitem":
            return 0.0
        if op.op == "embedding":  # reads only the rows of the table that it returns
            operands = operands[1:]
        traffic = self.local_bytes(op, made) + sum(self.local_bytes(operand, read) for operand, read in operands)
        return OperationCost(flops, traffic).seconds(self.peak, self.bandwidth)

    def _reach(self, op: Operator, before: Sharding) -> dict[Sharding, Path]:
        key = (op.shape, self.get_itemsize(op))
        if key not in self._searches:
            self._searches[key] = MoveSearch(self.mesh, op.sizes, key[1], self.network)
        if (*key, before) not in self._reached:
            self._reached[*key, before] = self._searches[key].reach({before: 0.0})
        return self._reached[*key, before]
