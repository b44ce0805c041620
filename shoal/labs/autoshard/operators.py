"""Plan the sharding of any module, operator by operator, from options of a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.units import show_bytes
from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.own.definition import execute_file
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.notation.notation import parse_mesh
from shoal.planning.auto.capture.forward import export_forward
from shoal.planning.auto.capture.trace import capture_graph
from shoal.planning.auto.intra.ilp import SECONDS, NothingFits
from shoal.planning.auto.search import (
    OperatorPlan,
    StagedPlan,
    Target,
    find_capacity,
    list_grids,
    plan_stages,
    plan_unstaged,
)
from shoal.planning.run import KINDS
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.clusters import Cluster, cluster
from shoal.spec.number_formats import FORMATS


def plan_operators(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    cluster_name: str = "8xA100",
    mesh: str = "",
    stages: PositiveInt = 1,
    microbatches: PositiveInt = 1,
    precision: str = "bf16",
    memory: str = "",
) -> OperatorPlan | StagedPlan:
    """Plan the sharding of a module: an integer program inside a stage, dynamic programming over stages.

    Args:
        module: in float64; it may be on the meta device.
        cluster_name: such as ``8xA100``.
        mesh: the grid of devices, such as ``x=2,y=4``; by default several grids are tried.
        stages: maximum number of pipeline stages; with 1 all devices compute all layers.
        microbatches: per step.
        precision: of training: bf16, fp16 or fp32.
        memory: of a device, such as ``16GB``; by default what libraries and the process leave of the accelerator's.

    Raises:
        UsageError: an unknown name, a module without a graph, or a mesh that does not match the cluster.
        NothingFits: no plan fits into the memory; a `UsageError`.

    >>> import torch
    >>> from shoal.labs.autoshard.operators import plan_operators
    >>> with torch.device("meta"):
    ...     mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).double()
    ...     example = (torch.empty(32, 64, dtype=torch.float64),)
    >>> plan_operators(mlp, example, cluster_name="4xA100").plan.mesh.ranks
    4
    """
    machine = cluster(cluster_name)
    if machine.missing:
        full = machine.part(machine.nodes - 1).name
        raise UsageError(f"--cluster {cluster_name}: grids need full nodes.\n  Give {full}.")
    known = {name: f for name, f in FORMATS.items() if f.compute.name in KINDS and f.products == "compute"}
    if precision not in known:
        raise UsageError(f"--precision {precision}: {did_you_mean(precision, known)}")
    target = Target(machine, known[precision], microbatches, find_capacity(machine, memory))
    meshes = _list_meshes(mesh, machine)
    if stages == 1:
        return plan_unstaged(capture_graph(module, inputs), target, meshes)
    if mesh:
        raise UsageError("--mesh with --stages: each stage has its own grid.\n  Leave one of them out.")
    return plan_stages(export_forward(module, inputs), target, stages)


def try_plan(module: nn.Module, inputs: tuple[Any, ...], **options: Any) -> OperatorPlan | StagedPlan | str:
    """Plan as `plan_operators` does; where nothing fits, return that in words."""
    try:
        return plan_operators(module, inputs, **options)
    except NothingFits as nothing:
        what = "sharding" if options["stages"] == 1 else "pipeline"
        capacity = show_bytes(find_capacity(cluster(options["cluster_name"]), options["memory"]))
        if nothing.proven:
            return f"No {what} fits into {capacity} per device."
        return f"No {what} within {capacity} per device was found in the time limit of {SECONDS:.0f} s per solve."


def _list_meshes(text: str, machine: Cluster) -> Sequence[NamedMesh]:
    if not text:
        return list_grids(machine.nodes, machine.per_node)
    mesh = parse_mesh(text)
    if mesh.ranks != machine.size:
        raise UsageError(f"--mesh {text}: {mesh.ranks} devices, and {machine.name} has {machine.size}")
    if len(mesh.axes) > 2:
        raise UsageError(f"--mesh {text}: {len(mesh.axes)} axes; use one or two")
    return [mesh]


# ---- the module to plan, with example inputs -------------------------------------------------------------------------

Subject = tuple[nn.Module, tuple[Any, ...]]


def select_shape(model: str, layers: int | None, sequence_length: int) -> ModelShape:
    """Return the shape of a dense model of the catalog, or of its first layers.

    Raises:
        UsageError: the model has experts or fewer layers, or fewer positions than tokens.
    """
    shape = model_shape(model)
    if shape.experts or shape.depths:
        raise UsageError(f"--model {model}: the tokens of an expert depend on numbers; plan a dense model")
    if layers:
        if layers > shape.layers:
            raise UsageError(f"--layers {layers}: {model} has {shape.layers}")
        shape = shape.model_copy(update={"layers": layers})
    if shape.family == "gpt" and sequence_length > shape.max_sequence:
        raise UsageError(f"--sequence-length {sequence_length}: {model} has positions for {shape.max_sequence}")
    return shape


def build_model(shape: ModelShape, sequences: int, sequence_length: int, *, check: bool) -> Subject:
    """Build a model in float64 and the tokens of a micro-batch, on the meta device unless it is checked."""
    with torch.device("cpu" if check else "meta"):
        model = Transformer(shape).double()
        if check:
            initialise(model, 0)
            tokens = torch.randint(0, shape.vocab, (sequences, sequence_length))
        else:
            tokens = torch.empty((sequences, sequence_length), dtype=torch.int64)
    return model, (tokens, tokens)


def load_module(text: str, *, check: bool) -> Subject:
    """Load a user's module, in float64, and its inputs; with ``check`` they must not be on the meta device.

    Raises:
        UsageError: the function does not exist, fails, or returns something else.
    """
    file, _, name = text.rpartition(":")
    if not file or not name:
        raise UsageError(f"--module {text}: give FILE.py:FUNCTION")
    try:
        made = execute_file(Path(file), name, f"--module {text}")()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--module {text}: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"--module {text}: {name}() must return (module, example inputs)")
    module, inputs = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = torch.utils._pytree.tree_leaves(inputs)
    held = {"its weights": module.parameters(), "its buffers": module.buffers(), "the inputs": leaves}
    empty = [what for what, every in held.items() if any(isinstance(x, torch.Tensor) and x.is_meta for x in every)]
    if check and empty:
        raise UsageError(
            f"--module {text} --check: {' and '.join(empty)} are on the meta device, which holds no numbers.\n"
            "  Make them on the CPU, or plan without --check."
        )
    return module.double(), torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )
