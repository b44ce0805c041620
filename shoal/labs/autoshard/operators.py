"""Split any module over a cluster, operator by operator, and prove the plan on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.units import BYTES, parse
from shoal.labs.autoshard.capture.forward import Forward, forward_of
from shoal.labs.autoshard.capture.graph import OperatorGraph
from shoal.labs.autoshard.capture.layers import Layers
from shoal.labs.autoshard.capture.trace import graph_of
from shoal.labs.autoshard.execute import compare, reference, worst_of
from shoal.labs.autoshard.intra.ilp import NothingFits, solve
from shoal.labs.autoshard.intra.price import Prices
from shoal.labs.autoshard.intra.problem import GIVEN, UPDATE, Builder, Bytes
from shoal.labs.autoshard.listing import EXACT, Other
from shoal.labs.autoshard.notation.notation import NamedMesh, parse_mesh
from shoal.labs.autoshard.pipelined import Pipelined, StagePlan, compare_stages, grids
from shoal.labs.autoshard.plan import ShardingPlan, plan_of
from shoal.labs.autoshard.rivals import rivals
from shoal.labs.autoshard.stages import latency
from shoal.planning.cost.memory.stage import capacity_of, fragmentation_of, unused_of
from shoal.planning.run import KINDS
from shoal.spec.catalog.calibration import calibration_of
from shoal.spec.catalog.clusters import Cluster, cluster
from shoal.spec.number_formats import FORMATS, Formats

MOST_RANKS = 8
LAYERS_PER_STAGE = 2  # into which the operators are clustered


class Difference(NamedTuple):
    """How far a plan on real ranks is from one device.

    Attributes:
        ranks: that ran it.
        largest: difference, in float64; ``name`` says of what.
        compared: what was compared, in words.
    """

    ranks: int
    largest: float
    name: str
    compared: str

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device does, but for rounding."""
        return self.largest <= EXACT


class OperatorPlan(NamedTuple):
    """A module split over all devices.

    Attributes:
        plan: the best sharding of every operator that was found.
        others: the splits that people write, beside it.
        machine: the cluster.
    """

    plan: ShardingPlan
    others: list[Other]
    machine: Cluster


class StagedPlan(NamedTuple):
    """A module cut into pipeline stages, each split over a part of the cluster.

    Attributes:
        stages: in order.
        layers: clusters of operators that stages are made of.
        seconds: of a step.
        single_seconds: of a step without stages; infinite if that does not fit.
        machine: the cluster.
        forward: the module's forward, as stages cut it.
    """

    stages: list[StagePlan]
    layers: int
    seconds: float
    single_seconds: float
    machine: Cluster
    forward: Forward


def plan_operators(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    cluster_name: str = "8xA100",
    mesh: str = "",
    stages: int = 1,
    microbatches: int = 1,
    precision: str = "bf16",
    memory: str = "",
) -> OperatorPlan | StagedPlan:
    """Find how to split a module, operator by operator: an integer program inside a stage, dynamic programming between.

    Args:
        module: in float64; it may lie on the meta device.
        inputs: an example of what it is called with.
        cluster_name: the cluster, as ``8xA100``.
        mesh: the devices as a grid, as ``x=2,y=4``; by default several grids are tried.
        stages: the most pipeline stages; with 1 all devices do all layers.
        microbatches: of a step.
        precision: of training: bf16, fp16 or fp32.
        memory: of a device, as ``16GB``; by default what the accelerator has left.

    Raises:
        UsageError: a name that is not known, a module that has no graph, or a mesh that the cluster does not have.
        NothingFits: no plan needs as little memory as there is.

    >>> import torch
    >>> from shoal.labs.autoshard.operators import plan_operators
    >>> with torch.device("meta"):
    ...     mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).double()
    ...     example = (torch.empty(32, 64, dtype=torch.float64),)
    >>> plan_operators(mlp, example, cluster_name="4xA100").plan.mesh.ranks
    4
    """
    machine, formats = cluster(cluster_name), _formats(precision)
    meshes, capacity = _meshes(mesh, machine), capacity_on(machine, memory)
    if stages > 1:
        if mesh:
            raise UsageError("--mesh with --stages: every stage has a grid of its own.\n  Leave one of them out.")
        return _plan_stages(forward_of(module, inputs), machine, formats, capacity, stages, microbatches)
    graph = graph_of(module, inputs)
    best: OperatorPlan | None = None
    proven = True
    for grid in meshes:
        try:
            found = _plan_on(graph, machine, grid, formats, microbatches, capacity)
        except NothingFits as nothing:
            proven = proven and nothing.proven
            continue
        if best is None or found.plan.seconds < best.plan.seconds:
            best = found
    if best is None:
        raise NothingFits(proven)
    return best


def capacity_on(machine: Cluster, memory: str = "") -> float:
    """Bytes of a device for weights, gradients, states and activations."""
    if memory:
        return parse(memory, BYTES, where="--memory")
    constants = calibration_of(machine)
    return capacity_of(machine, constants) - unused_of(machine, constants)


def check_ranks(machine: Cluster) -> None:
    """Refuse to run a plan on more ranks than are started here.

    Raises:
        UsageError: naming how many.
    """
    if machine.size > MOST_RANKS:
        raise UsageError(f"--check: {machine.size} processes, one for each device; at most {MOST_RANKS} are started")


def run_plan(found: OperatorPlan | StagedPlan, module: nn.Module, inputs: tuple[Any, ...]) -> Difference:
    """Run a plan on real ranks, one for each device, in float64, beside the module on one device."""
    from shoal.launch.worker_pool import Pool

    graph = found.plan.graph if isinstance(found, OperatorPlan) else graph_of(module, inputs)
    given, expected = reference(module, inputs, graph)
    if isinstance(found, OperatorPlan):
        ranks = found.plan.mesh.ranks
        with Pool(ranks) as pool:
            results = pool.run(compare, ranks, found.plan, given, expected)
        compared = f"{len(expected)} outputs and gradients, and every weight after a step"
    else:
        ranks = found.machine.size
        outputs = {
            node.name: expected[GIVEN + op] for node, op in zip(found.forward.outputs, graph.outputs, strict=True)
        }
        gradients = {name: x for name, x in expected.items() if name.startswith(UPDATE)}
        with Pool(ranks) as pool:
            results = pool.run(compare_stages, ranks, found.stages, given, outputs, gradients)
        compared = f"{len(outputs)} outputs and {len(gradients)} gradients"
    return Difference(len(results), *worst_of(results), compared)


def _formats(precision: str) -> Formats:
    known = {name: f for name, f in FORMATS.items() if f.compute.name in KINDS and f.products == "compute"}
    if precision not in known:
        raise UsageError(f"--precision {precision}: {did_you_mean(precision, known)}")
    return known[precision]


def _meshes(text: str, machine: Cluster) -> Sequence[NamedMesh]:
    """The grids to try."""
    if text:
        mesh = parse_mesh(text)
        if mesh.ranks != machine.size:
            raise UsageError(f"--mesh {text}: {mesh.ranks} devices, and {machine.name} has {machine.size}")
        if len(mesh.axes) > 2:
            raise UsageError(f"--mesh {text}: {len(mesh.axes)} axes; one or two are planned for")
        return [mesh]
    return grids(machine.nodes, machine.per_node)


def _plan_on(
    graph: OperatorGraph, machine: Cluster, mesh: NamedMesh, formats: Formats, microbatches: int, capacity: float
) -> OperatorPlan:
    """The best plan on a mesh, with the splits by hand.

    Raises:
        NothingFits: there is none.
    """
    prices = Prices.on(machine, mesh, KINDS[formats.compute.name], formats.compute.itemsize)
    builder = Builder(graph, prices, bytes_beside(formats), microbatches)
    problem, alive = builder.problem(), 1 + fragmentation_of(calibration_of(machine))
    best = plan_of(builder, problem, solve(problem, capacity, alive))
    others: list[Other] = []
    for name, rival in rivals(builder, problem).items():
        try:
            found = plan_of(builder, rival.problem, solve(rival.problem, capacity, alive))
            others.append(Other(name, found, rival.layout))
        except NothingFits as nothing:
            others.append(Other(name, None, rival.layout, nothing.proven))
    return OperatorPlan(best, others, machine)


def bytes_beside(formats: Formats) -> Bytes:
    """What a weight needs beside itself, with AdamW."""
    master = formats.storage.itemsize if formats.master else 0
    return Bytes(formats.reduce.itemsize, 2 * formats.state.itemsize + master)


def _plan_stages(
    forward: Forward, machine: Cluster, formats: Formats, capacity: float, stages: int, microbatches: int
) -> StagedPlan:
    """Both levels: stages on parts of the cluster, beside all devices for all layers.

    Raises:
        UsageError: something that is given back belongs to no stage.
        NothingFits: there is none.
    """
    layers = Layers(forward, LAYERS_PER_STAGE * stages)
    joint = Pipelined(
        layers, machine, KINDS[formats.compute.name], formats.compute.itemsize, bytes_beside(formats), microbatches,
        capacity, fragmentation_of(calibration_of(machine)),
    )  # fmt: skip
    came = [node for node in forward.outputs if node not in layers.nodes]
    if any(node.op != "placeholder" for node in came):
        raise _came_back(came)
    found = joint.stages(stages)
    if found is None:
        raise NothingFits(joint.proven)
    single = joint.cost(0, joint.count, (machine.nodes, machine.per_node), 1) * microbatches
    return StagedPlan(joint.planned(found), joint.count, latency(found, microbatches), single, machine, forward)


def check_outputs(found: StagedPlan) -> None:
    """Refuse to check stages of a module that gives an input back.

    Raises:
        UsageError: naming what no stage makes.
    """
    if came := [node for node in found.forward.outputs if node.op == "placeholder"]:
        raise _came_back(came)


def _came_back(nodes: Sequence[Any]) -> UsageError:
    return UsageError(
        f"--stages: the module gives back {', '.join(node.name for node in nodes)} as it came, which no stage makes.\n"
        "  Return what operators make of parameters or inputs alone."
    )
