"""Search for the best way to split a graph: over all devices of a cluster, or over pipeline stages on parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from shoal.base.errors import UsageError
from shoal.labs.autoshard.capture.forward import Forward
from shoal.labs.autoshard.capture.graph import OperatorGraph
from shoal.labs.autoshard.capture.layers import Layers
from shoal.labs.autoshard.intra.ilp import NothingFits, Solution, solve
from shoal.labs.autoshard.intra.price import Prices
from shoal.labs.autoshard.intra.problem import Builder, Bytes, ShardingProblem
from shoal.labs.autoshard.notation.notation import NamedMesh
from shoal.labs.autoshard.plan import HandSplit, ShardingPlan, StagePlan, build_plan
from shoal.labs.autoshard.rivals import rivals
from shoal.labs.autoshard.stages import AssignedStage, Part, latency, pipeline
from shoal.planning.cost.memory.stage import allocator_excess
from shoal.planning.cost.time.communication import ring_of
from shoal.planning.cost.time.engine_layer import attained
from shoal.planning.run import KINDS
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.number_formats import Formats

LAYERS_PER_STAGE = 2  # into which the operators are clustered
TRACED = 8  # bytes of an element of the traced graph


class OperatorPlan(NamedTuple):
    """A module split over all devices.

    Attributes:
        plan: the best sharding of every operator that was found.
        others: the splits that people write, on the same mesh.
        machine: the cluster.
    """

    plan: ShardingPlan
    others: list[HandSplit]
    machine: Cluster


class StagedPlan(NamedTuple):
    """A module cut into pipeline stages, each split over a part of the cluster.

    Attributes:
        stages: in order.
        layers: number of clusters of operators that stages are made of.
        seconds: of a step.
        single_seconds: of a step without stages; infinite if that does not fit.
        machine: the cluster.
        forward: the module's forward pass, as stages cut it.
    """

    stages: list[StagePlan]
    layers: int
    seconds: float
    single_seconds: float
    machine: Cluster
    forward: Forward


@dataclass(frozen=True)
class Target:
    """What a module is planned for.

    Attributes:
        formats: number formats of training.
        microbatches: of a step.
        capacity: bytes of a device.
    """

    cluster: Cluster
    formats: Formats
    microbatches: int
    capacity: float

    def builder(self, graph: OperatorGraph, mesh: NamedMesh) -> Builder:
        """The builder of a graph's problem on a mesh, with AdamW's states."""
        formats = self.formats
        prices = Prices.on(self.cluster, mesh, KINDS[formats.compute.name], formats.compute.itemsize)
        master = formats.storage.itemsize if formats.master else 0
        bytes_ = Bytes(formats.reduce.itemsize, 2 * formats.state.itemsize + master)
        return Builder(graph, prices, bytes_, self.microbatches)

    def solve(self, problem: ShardingProblem, kept: int = 1) -> Solution:
        """The cheapest solution that fits, with ``kept`` micro-batches waiting for their backward pass.

        Raises:
            NothingFits: there is none.
        """
        return solve(problem, self.capacity, kept * (1 + allocator_excess(cluster_calibration(self.cluster))))

    def best(
        self, graph: OperatorGraph, meshes: Sequence[NamedMesh], kept: int = 1
    ) -> tuple[Builder, ShardingProblem, Solution]:
        """The cheapest solution on any of some meshes.

        Raises:
            NothingFits: there is none on any of them.
        """
        best, proven = None, True
        for mesh in meshes:
            builder = self.builder(graph, mesh)
            problem = builder.problem()
            try:
                found = self.solve(problem, kept)
            except NothingFits as nothing:
                proven = proven and nothing.proven
                continue
            if best is None or found.cost < best[2].cost:
                best = builder, problem, found
        if best is None:
            raise NothingFits(proven)
        return best


def plan_whole(graph: OperatorGraph, target: Target, meshes: Sequence[NamedMesh]) -> OperatorPlan:
    """The best plan on all devices, beside the splits by hand.

    Raises:
        NothingFits: there is none.
    """
    builder, problem, found = target.best(graph, meshes)
    others = []
    for name, rival in rivals(builder, problem).items():
        try:
            plan = build_plan(builder, rival.problem, target.solve(rival.problem))
            others.append(HandSplit(name, plan, rival.layout))
        except NothingFits as nothing:
            others.append(HandSplit(name, None, rival.layout, nothing.proven))
    return OperatorPlan(build_plan(builder, problem, found), others, target.cluster)


def plan_stages(forward: Forward, target: Target, most: int) -> StagedPlan:
    """The best pipeline of up to ``most`` stages on parts of the cluster.

    Raises:
        UsageError: something that is given back belongs to no stage.
        NothingFits: there is none.
    """
    search = StageSearch(Layers(forward, LAYERS_PER_STAGE * most), target)
    came = [node for node in forward.outputs if node not in search.layers.nodes]
    if any(node.op != "placeholder" for node in came):
        raise _came_back(came)
    cluster, count = target.cluster, search.count
    found = pipeline(search.cost, count, cluster.nodes, cluster.per_node, target.microbatches, most)
    if found is None:
        raise NothingFits(search.proven)
    single = search.cost(0, count, (cluster.nodes, cluster.per_node), 1) * target.microbatches
    return StagedPlan(search.place(found), count, latency(found, target.microbatches), single, cluster, forward)


def check_outputs(found: StagedPlan) -> None:
    """Refuse to check stages of a module that gives an input back.

    Raises:
        UsageError: naming what no stage makes.
    """
    if came := [node for node in found.forward.outputs if node.op == "placeholder"]:
        raise _came_back(came)


def _came_back(nodes: Sequence) -> UsageError:
    return UsageError(
        f"--stages: the module gives back {', '.join(node.name for node in nodes)} as it came, which no stage makes.\n"
        "  Return what operators make of parameters or inputs alone."
    )


@dataclass
class StageSearch:
    """Stages made of layers, each as fast as its own best sharding.

    Attributes:
        proven: whether whatever was found not to fit is known not to; else time was up for some of it.
    """

    layers: Layers
    target: Target
    proven: bool = True
    _known: dict[tuple, float] = field(default_factory=dict)

    @cached_property
    def count(self) -> int:
        """Number of layers."""
        return len(self.layers.ends)

    def cost(self, first: int, last: int, part: Part, left: int) -> float:
        """Seconds of a micro-batch of some layers on a part of the cluster; equal layers are planned once."""
        if self.layers.shares(first, last):
            return inf
        key = (self.layers.like(first, last), part, self._kept(left))
        if key not in self._known:
            try:
                self._known[key] = self._best(first, last, part, left)[2].cost
            except NothingFits as nothing:
                self._known[key], self.proven = inf, self.proven and nothing.proven
        return self._known[key] + self.receive_seconds(first, part)

    def receive_seconds(self, first: int, part: Part) -> float:
        """Seconds to receive a stage's inputs and to send their gradients back, each device its share."""
        cluster, devices = self.target.cluster, part[0] * part[1]
        size = self.layers.boundary(first) * self.target.formats.compute.itemsize / TRACED / devices
        apart = cluster.per_node if cluster.nodes > 1 else 1
        return 2 * ring_of(attained(cluster), 2, apart).send(size) if size and cluster.size > 1 else 0.0

    def plan(self, first: int, last: int, part: Part, left: int) -> ShardingPlan:
        """The best sharding of some layers on a part.

        Args:
            left: stages from this one on.

        Raises:
            NothingFits: on no grid.
        """
        return build_plan(*self._best(first, last, part, left))

    def place(self, stages: tuple[AssignedStage, ...]) -> list[StagePlan]:
        """Every stage with its sharding, on devices one after another: whole nodes first, then the largest parts."""
        found, rank = {}, 0
        for number in sorted(range(len(stages)), key=lambda i: -stages[i].devices):
            stage = stages[number]
            plan = self.plan(stage.first, stage.last, stage.part, len(stages) - number)
            names = [node.name for node in self.layers.part(stage.first, stage.last).outputs]
            sends = tuple(zip(names, plan.graph.outputs, strict=True))
            found[number] = StagePlan(stage.first, stage.last, stage.seconds, rank, plan, sends)
            rank += stage.devices
        return [found[number] for number in range(len(stages))]

    def _best(self, first: int, last: int, part: Part, left: int) -> tuple[Builder, ShardingProblem, Solution]:
        return self.target.best(self.layers.graph(first, last), grids(*part), self._kept(left))

    def _kept(self, left: int) -> int:
        """Return how many micro-batches 1F1B keeps at once on a stage, given the stages left, this one included."""
        return min(left, self.target.microbatches)


def grids(nodes: int, per_node: int) -> list[NamedMesh]:
    """All devices in a row; and as a grid, of nodes by their devices, or inside a node in every way."""
    n = nodes * per_node
    if n == 1:
        return [NamedMesh("", ())]
    pairs = [(nodes, per_node)] if nodes > 1 else [(a, n // a) for a in range(2, n) if n % a == 0]
    return [NamedMesh("x", (n,)), *(NamedMesh("xy", pair) for pair in pairs if min(pair) > 1)]
