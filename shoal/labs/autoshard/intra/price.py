"""What moves and blocks of work take on a mesh of a cluster: prices of `shoal.planning.cost`, asked for once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.labs.autoshard.capture.graph import VIEWS, Operator
from shoal.labs.autoshard.intra.choices import sizes_of
from shoal.labs.autoshard.notation.cost.network import Network
from shoal.labs.autoshard.notation.cost.routes import Planner, Reached
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding
from shoal.labs.autoshard.notation.route import RoutedMove
from shoal.labs.collectives.description import Collective
from shoal.planning.cost.roofline import OperationCost
from shoal.planning.cost.time.communication import ring_of
from shoal.planning.cost.time.engine_layer import attained, memory_rate, product_rate
from shoal.spec.catalog.clusters import Cluster


@dataclass(frozen=True)
class OfCluster:
    """The network of a cluster, as it is attained, that a mesh fills in order; or of a part of it that begins where a
    node does.

    Collectives along an axis go over rings, as `shoal estimate` prices them.
    """

    mesh: NamedMesh
    cluster: Cluster

    def price(self, collective: str, axes: str, size: float) -> tuple[float, str]:
        """Seconds, and the algorithm (`Network`)."""
        inner = min(axes, key=lambda axis: -self.mesh.axes.index(axis))
        stride = math.prod(self.mesh.shape[self.mesh.axes.index(inner) + 1 :])
        ring = ring_of(self.cluster, self.mesh.size(axes), stride)
        if collective == Collective.ALL_TO_ALL:
            return ring.all_to_all(size * (ring.ranks - 1) / ring.ranks), "pairwise"
        return getattr(ring, str(collective).replace("-", "_"))(size), "ring"


@dataclass
class Prices:
    """Seconds of moves and of work on one device.

    Attributes:
        network: what prices a collective.
        peak: FLOP/s that a device attains in products of large matrices.
        bandwidth: bytes/s that it attains of its memory.
        itemsize: bytes of a floating-point number.
    """

    mesh: NamedMesh
    network: Network
    peak: float
    bandwidth: float
    itemsize: int
    _planners: dict[tuple[tuple[int, ...], int], Planner] = field(default_factory=dict)
    _known: dict[tuple[tuple[int, ...], int, Sharding], dict[Sharding, Reached]] = field(default_factory=dict)

    @staticmethod
    def on(cluster: Cluster, mesh: NamedMesh, kind: str, itemsize: int) -> Prices:
        """On a mesh of a cluster; ``kind`` is the number format of its products, as the catalog has it."""
        peak = product_rate(cluster, kind) / cluster.turns
        return Prices(mesh, OfCluster(mesh, attained(cluster)), peak, memory_rate(cluster), itemsize)

    def bytes_of(self, op: Operator) -> int:
        """Of one element of what an operator makes."""
        return self.itemsize if op.dtype.is_floating_point else op.dtype.itemsize

    def local(self, op: Operator, lies: Sharding) -> float:
        """Bytes that a device holds of a tensor."""
        return op.numel / self.mesh.size("".join(axes for _, axes in lies.dims)) * self.bytes_of(op)

    def move(self, op: Operator, before: Sharding, after: Sharding) -> float:
        """Seconds of the cheapest moves of a tensor; infinite where there are none."""
        if before == after:
            return 0.0
        way = self._ways(op, before).get(after)
        return math.inf if way is None else way.cost

    def path(self, op: Operator, before: Sharding, after: Sharding) -> tuple[RoutedMove, ...]:
        """These moves."""
        return self._ways(op, before)[after].path

    def work(self, op: Operator, flops: float, operands: list[tuple[Operator, Sharding]], made: Sharding) -> float:
        """Seconds of one device's part of an operator: the longer of its products and of what it reads and writes."""
        if op.op in VIEWS or op.op == "getitem":
            return 0.0
        if op.op == "embedding":  # of the table it reads the rows that it gives
            operands = operands[1:]
        moved = self.local(op, made) + sum(self.local(operand, lies) for operand, lies in operands)
        return OperationCost(flops, moved).seconds(self.peak, self.bandwidth)

    def _ways(self, op: Operator, before: Sharding) -> dict[Sharding, Reached]:
        key = (op.shape, self.bytes_of(op))
        if key not in self._planners:
            self._planners[key] = Planner(self.mesh, sizes_of(op.shape), key[1], self.network, self.peak)
        if (*key, before) not in self._known:
            self._known[*key, before] = self._planners[key].reach({before: 0.0})
        return self._known[*key, before]
