"""Split any module over a cluster, operator by operator, from names that a user types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.units import BYTES, parse
from shoal.labs.autoshard.capture.forward import forward_of
from shoal.labs.autoshard.capture.trace import graph_of
from shoal.labs.autoshard.notation.notation import NamedMesh, parse_mesh
from shoal.labs.autoshard.search import OperatorPlan, StagedPlan, Target, grids, plan_stages, plan_whole
from shoal.planning.cost.memory.stage import device_capacity, library_bytes
from shoal.planning.run import KINDS
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster, cluster
from shoal.spec.number_formats import FORMATS, Formats


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
    machine = cluster(cluster_name)
    target = Target(machine, _formats(precision), microbatches, capacity_on(machine, memory))
    meshes = _meshes(mesh, machine)
    if stages == 1:
        return plan_whole(graph_of(module, inputs), target, meshes)
    if mesh:
        raise UsageError("--mesh with --stages: every stage has a grid of its own.\n  Leave one of them out.")
    return plan_stages(forward_of(module, inputs), target, stages)


def capacity_on(machine: Cluster, memory: str = "") -> float:
    """Bytes of a device for weights, gradients, states and activations."""
    if memory:
        return parse(memory, BYTES, where="--memory")
    constants = cluster_calibration(machine)
    return device_capacity(machine, constants) - library_bytes(machine, constants)


def _formats(precision: str) -> Formats:
    known = {name: f for name, f in FORMATS.items() if f.compute.name in KINDS and f.products == "compute"}
    if precision not in known:
        raise UsageError(f"--precision {precision}: {did_you_mean(precision, known)}")
    return known[precision]


def _meshes(text: str, machine: Cluster) -> Sequence[NamedMesh]:
    """The grids to try."""
    if not text:
        return grids(machine.nodes, machine.per_node)
    mesh = parse_mesh(text)
    if mesh.ranks != machine.size:
        raise UsageError(f"--mesh {text}: {mesh.ranks} devices, and {machine.name} has {machine.size}")
    if len(mesh.axes) > 2:
        raise UsageError(f"--mesh {text}: {len(mesh.axes)} axes; one or two are planned for")
    return [mesh]
