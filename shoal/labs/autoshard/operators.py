"""Plan the sharding of any module, operator by operator, from options of a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.units import BYTES, parse
from shoal.labs.autoshard.capture.forward import export_forward
from shoal.labs.autoshard.capture.trace import capture_graph
from shoal.labs.autoshard.notation.notation import NamedMesh, parse_mesh
from shoal.labs.autoshard.search import OperatorPlan, StagedPlan, Target, list_grids, plan_stages, plan_unstaged
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
    """Plan the sharding of a module: an integer program inside a stage, dynamic programming over stages.

    Args:
        module: in float64; it may be on the meta device.
        inputs: example arguments.
        cluster_name: such as ``8xA100``.
        mesh: the grid of devices, such as ``x=2,y=4``; by default several grids are tried.
        stages: maximum number of pipeline stages; with 1 all devices compute all layers.
        microbatches: per step.
        precision: of training: bf16, fp16 or fp32.
        memory: of a device, such as ``16GB``; by default what libraries and the process leave of the accelerator's.

    Raises:
        UsageError: an unknown name, a module without a graph, or a mesh that does not match the cluster.
        NothingFits: no plan fits into the memory.

    >>> import torch
    >>> from shoal.labs.autoshard.operators import plan_operators
    >>> with torch.device("meta"):
    ...     mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).double()
    ...     example = (torch.empty(32, 64, dtype=torch.float64),)
    >>> plan_operators(mlp, example, cluster_name="4xA100").plan.mesh.ranks
    4
    """
    machine = cluster(cluster_name)
    target = Target(machine, _parse_precision(precision), microbatches, find_capacity(machine, memory))
    meshes = _list_meshes(mesh, machine)
    if stages == 1:
        return plan_unstaged(capture_graph(module, inputs), target, meshes)
    if mesh:
        raise UsageError("--mesh with --stages: each stage has its own grid.\n  Leave one of them out.")
    return plan_stages(export_forward(module, inputs), target, stages)


def find_capacity(machine: Cluster, memory: str = "") -> float:
    """Return the bytes of a device for weights, gradients, states and activations."""
    if memory:
        return parse(memory, BYTES, where="--memory")
    constants = cluster_calibration(machine)
    return device_capacity(machine, constants) - library_bytes(machine, constants)


def _parse_precision(precision: str) -> Formats:
    known = {name: f for name, f in FORMATS.items() if f.compute.name in KINDS and f.products == "compute"}
    if precision not in known:
        raise UsageError(f"--precision {precision}: {did_you_mean(precision, known)}")
    return known[precision]


def _list_meshes(text: str, machine: Cluster) -> Sequence[NamedMesh]:
    if not text:
        return list_grids(machine.nodes, machine.per_node)
    mesh = parse_mesh(text)
    if mesh.ranks != machine.size:
        raise UsageError(f"--mesh {text}: {mesh.ranks} devices, and {machine.name} has {machine.size}")
    if len(mesh.axes) > 2:
        raise UsageError(f"--mesh {text}: {len(mesh.axes)} axes; use one or two")
    return [mesh]
