"""Search for the best way to split a graph: over all devices of a cluster, or over pipeline stages on parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from torch.fx import Node

from shoal.base.errors import UsageError
from shoal.base.units import BYTES, parse
from shoal.engine.sharding.graph import OperatorGraph
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.engine.sharding.plan import ShardingPlan
from shoal.planning.auto.baselines import restrict_to_baselines
from shoal.planning.auto.capture.forward import Forward
from shoal.planning.auto.capture.layers import Layers
from shoal.planning.auto.capture.trace import differentiate
from shoal.planning.auto.intra.ilp import NothingFits, Solution, solve
from shoal.planning.auto.intra.price import Prices
from shoal.planning.auto.intra.problem import Builder, ShardingProblem
from shoal.planning.auto.plan import Baseline, StagePlan, build_plan
from shoal.planning.auto.stages import AssignedStage, Part, find_pipeline, latency
from shoal.planning.cost.memory.stage import device_capacity, library_bytes
from shoal.planning.cost.time.communication import ring_group
from shoal.planning.cost.time.engine_layer import attained
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.number_formats import Formats

LAYERS_PER_STAGE = 2  # clusters of operators
TRACED = 8  # bytes of an element of the traced graph


class OperatorPlan(NamedTuple):
    """A module split over all devices."""

    plan: ShardingPlan
    baselines: list[Baseline]
    machine: Cluster


class StagedPlan(NamedTuple):
    """A module cut into pipeline stages, each split over a part of the cluster."""

    stages: list[StagePlan]
    assigned: tuple[AssignedStage, ...]  # the layers and the part of the cluster of each stage
    layers: int  # number of clusters of operators, of which stages are made
    seconds: float  # of a step
    single_seconds: float  # of a step without stages; infinite if that does not fit
    machine: Cluster


@dataclass(frozen=True)
class Target:
    """The hardware and the training step that a module is planned for."""

    cluster: Cluster
    formats: Formats
    microbatches: int  # per step
    capacity: float  # of a device [bytes]
    in_place: bool = False  # whether the optimizer states of a weight have to be split as it is, beside `shards`
    shards: int = 1  # replicas of the plan's devices over which ZeRO splits the states of each block

    def builder(self, graph: OperatorGraph, mesh: NamedMesh) -> Builder:
        prices = Prices.on(self.cluster, mesh, self.formats)
        prices.state_bytes /= self.shards
        return Builder(graph, prices, self.microbatches, in_place=self.in_place)

    def solve(self, problem: ShardingProblem, in_flight: int = 1) -> Solution:
        """Find the cheapest solution that fits, with ``in_flight`` micro-batches kept for the backward pass.

        Raises:
            NothingFits: no solution fits.
        """
        capacity = None if self.capacity == inf else self.capacity
        return solve(problem, capacity, in_flight * (1 + cluster_calibration(self.cluster).at("fragmentation")))

    def best(
        self, graph: OperatorGraph, meshes: Sequence[NamedMesh], in_flight: int = 1
    ) -> tuple[Builder, ShardingProblem, Solution]:
        """Find the cheapest solution on any of some meshes."""
        best, proven = None, True
        for mesh in meshes:
            builder = self.builder(graph, mesh)
            problem = builder.problem()
            try:
                found = self.solve(problem, in_flight)
            except NothingFits as nothing:
                proven = proven and nothing.proven
                continue
            if best is None or found.cost < best[2].cost:
                best = builder, problem, found
        if best is None:
            raise NothingFits(proven)
        return best


def plan_unstaged(graph: OperatorGraph, target: Target, meshes: Sequence[NamedMesh]) -> OperatorPlan:
    """Find the best plan on all devices, and the baselines beside it."""
    builder, problem, found = target.best(graph, meshes)
    baselines = []
    for name, (restricted, layout) in restrict_to_baselines(builder, problem).items():
        try:
            plan = build_plan(builder, restricted, target.solve(restricted))
            baselines.append(Baseline(name, plan, layout))
        except NothingFits as nothing:
            baselines.append(Baseline(name, None, layout, nothing.proven))
    return OperatorPlan(build_plan(builder, problem, found), baselines, target.cluster)


def plan_stages(forward: Forward, target: Target, most: int) -> StagedPlan:
    """Find the best pipeline of up to ``most`` stages on parts of the cluster, each of at least one device."""
    most = min(most, target.cluster.size)
    search = StageSearch(Layers(forward, LAYERS_PER_STAGE * most), target)
    check_outputs(node for node in forward.outputs if node not in search.layers.nodes and node.op != "placeholder")
    cluster, count = target.cluster, len(search.layers.ends)
    found = find_pipeline(search.cost, count, cluster.nodes, cluster.per_node, target.microbatches, most)
    if found is None:
        raise NothingFits(search.proven)
    single = search.cost(0, count, (cluster.nodes, cluster.per_node), 1) * target.microbatches
    return StagedPlan(search.place(found), found, count, latency(found, target.microbatches), single, cluster)


def check_outputs(stageless: Iterable[Node]) -> None:
    """Refuse outputs that no stage makes."""
    if names := ", ".join(node.name for node in stageless):
        raise UsageError(
            f"--stages: the module returns {names} unchanged, which no stage makes.\n"
            "  Return only what operators compute from parameters or inputs."
        )


@dataclass
class StageSearch:
    """Stages made of layers, each with its own best sharding."""

    layers: Layers
    target: Target
    proven: bool = True  # False if the time limit ended a search that had found no solution
    _known: dict[tuple, float] = field(default_factory=dict)
    _graphs: dict[tuple[int, int], OperatorGraph] = field(default_factory=dict)  # a trace takes longer than most solves

    def cost(self, first: int, last: int, part: Part, left: int) -> float:
        """Return the seconds of a micro-batch of some layers on a part; equal layers are planned once."""
        if self.layers.shares(first, last):
            return inf
        key = (self.layers.key(first, last), part, self._in_flight(left))
        if key not in self._known:
            try:
                self._known[key] = self.best(first, last, part, left)[2].cost
            except NothingFits as nothing:
                self._known[key], self.proven = inf, self.proven and nothing.proven
        return self._known[key] + self.receive_seconds(first, part)

    def receive_seconds(self, first: int, part: Part) -> float:
        """Return the seconds to receive a stage's inputs and send their gradients back, each device its share."""
        cluster, devices = self.target.cluster, part[0] * part[1]
        size = self.layers.boundary(first) * self.target.formats.compute.itemsize / TRACED / devices
        apart = cluster.per_node if cluster.nodes > 1 else 1
        return 2 * ring_group(attained(cluster), 2, apart).send(size) if size and cluster.size > 1 else 0.0

    def place(self, stages: tuple[AssignedStage, ...]) -> list[StagePlan]:
        """Plan every stage, and place them on consecutive devices: several nodes first, then the largest parts."""
        found, rank = {}, 0
        for number in sorted(range(len(stages)), key=lambda i: -stages[i].devices):
            stage = stages[number]
            plan = build_plan(*self.best(stage.first, stage.last, stage.part, len(stages) - number))
            names = [node.name for node in self.layers.part(stage.first, stage.last).outputs]
            sends = tuple(zip(names, plan.graph.outputs, strict=True))
            found[number] = StagePlan(rank, plan, sends)
            rank += stage.devices
        return [found[number] for number in range(len(stages))]

    def best(self, first: int, last: int, part: Part, left: int) -> tuple[Builder, ShardingProblem, Solution]:
        """Find the cheapest solution of some layers on a part, as the first of ``left`` stages."""
        if (first, last) not in self._graphs:
            self._graphs[first, last] = differentiate(self.layers.part(first, last))
        return self.target.best(self._graphs[first, last], list_grids(*part), self._in_flight(left))

    def _in_flight(self, left: int) -> int:
        """Return how many micro-batches 1F1B keeps on the first of ``left`` stages."""
        return min(left, self.target.microbatches)


def find_capacity(machine: Cluster, memory: str = "") -> float:
    """Return the bytes of a device for weights, gradients, states and activations."""
    if memory:
        return parse(memory, BYTES, where="--memory")
    constants = cluster_calibration(machine)
    return device_capacity(machine, constants) - library_bytes(machine, constants)


def list_grids(nodes: int, per_node: int) -> list[NamedMesh]:
    """List the grids of all devices: one axis; nodes by their devices; inside one node every grid of two axes."""
    n = nodes * per_node
    if n == 1:
        return [NamedMesh("", ())]
    pairs = [(nodes, per_node)] if nodes > 1 else [(a, n // a) for a in range(2, n) if n % a == 0]
    return [NamedMesh("x", (n,)), *(NamedMesh("xy", pair) for pair in pairs if min(pair) > 1)]
