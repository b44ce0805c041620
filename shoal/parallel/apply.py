"""One function that turns a plain model into this rank's stage of it, in a fixed order with its reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shoal.catalog import ModelShape
from shoal.comm.mesh import Mesh
from shoal.models.initial import fill
from shoal.models.transformer import Transformer, initial
from shoal.parallel.data import ShardedParameters
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.split import Split
from shoal.parallel.tensor import apply_tensor_parallel
from shoal.parallel.zero import GatherOnUse
from shoal.pipeline.split import keep_stage, share_tied
from shoal.precision import Policy


@dataclass
class Stage:
    """What one rank holds of one pipeline stage: the modules that compute and the parameters behind them."""

    index: int
    module: Transformer
    parameters: ShardedParameters


def build_stage(
    shape: ModelShape, stage: int, mesh: Mesh, policy: Policy, *, kernel: str = "sdpa", compile: bool = False
) -> Stage:
    """Build one stage of a model and allocate this rank's shard of it; `initialise` or a checkpoint fills it.

    Args:
        shape: the whole model.
        stage: which of the mesh's pipeline stages.
        kernel: of the attention core, "sdpa" or "explicit".
        compile: compile each layer, and the loss where it is not split.
    """
    layout = mesh.layout
    with torch.device("meta"):
        model = Transformer(shape)
    keep_stage(model, stage, layout.pp)  # first: what is not here need not be split
    splits = apply_tensor_parallel(model, shape, mesh)  # on the meta device, so no rank ever allocates a whole matrix
    splits = share_tied(splits, shape, stage, layout.pp)
    if shape.tied and layout.pp > 1:
        mesh.group("ends")  # on every stage, at the same point
    for layer in model.layers.values():
        layer.attention.core.kernel = kernel
    apply_recompute(model, layout.recompute)  # inside compile, which then sees one region to recompute
    if compile:
        for layer in model.layers.values():
            layer.forward = torch.compile(layer.forward, dynamic=False)
        if mesh.size("tp") == 1:  # a loss split over ranks is a collective, which cannot be fused
            model.loss.forward = torch.compile(model.loss.forward, dynamic=False)
    # Last, and so outermost: parameters are gathered before a layer is entered, recomputed or not.
    members = _materialise(model, splits, policy.compute, mesh.device)
    units = _units(model)
    owned = [list(dict.fromkeys(p for module in modules for p in module.parameters())) for modules in units]
    unclaimed = dict(members)  # a tied head belongs to the unit that comes first
    parameters = ShardedParameters(
        [[unclaimed.pop(p) for p in unit if p in unclaimed] for unit in owned], mesh, policy
    )
    if layout.zero == 3:
        needed = [
            [bucket for bucket in parameters.buckets if any(slot.parameter in set(unit) for slot in bucket.slots)]
            for unit in owned
        ]
        GatherOnUse(list(zip(units, needed, strict=True)), mesh.group("dp_shard"), keep_last=layout.pp == 1)
    return Stage(stage, model, parameters)


def initialise(stage: Stage, shape: ModelShape, seed: int) -> None:
    """Fill this rank's shards with the model's initial values, which depend on (seed, name, index) alone."""
    with torch.no_grad():
        for name, pieces in stage.parameters.weights().items():
            for piece in pieces:
                fill(
                    piece.tensor, name=name, whole=piece.whole, box=piece.box, initial=initial(name, shape), seed=seed
                )
        stage.parameters.gather()


def _units(model: Transformer) -> list[list[nn.Module]]:
    """What is used together, in forward order."""
    first = [[model.embed]] if model.embed is not None else []
    last = [[model.norm, model.head]] if model.head is not None else []
    return [*first, *([layer] for layer in model.layers.values()), *last]


def _materialise(
    model: Transformer, splits: dict[str, Split], dtype: torch.dtype, device: torch.device
) -> dict[nn.Parameter, tuple[nn.Parameter, Split, bool]]:
    """Replace every meta parameter by one whose data the engine will set: meta ones cannot take real data.

    Returns:
        By new parameter: (parameter, its split, whether weight decay applies: to matrices, not to norms and biases).
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    members = {}
    for name, parameter in list(model.named_parameters()):
        real[parameter] = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
        members[real[parameter]] = (real[parameter], splits[name], parameter.dim() > 1)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = real[parameter]
    return members
