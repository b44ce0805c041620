"""Turn a plain model into this rank's pipeline stages, applying every parallelism in a fixed order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.compiler import prepare_compiler
from shoal.engine.data.batches import Batch
from shoal.engine.models.attention_kernels import Kernel
from shoal.engine.models.cache import Slice
from shoal.engine.models.initial import fill, on_meta
from shoal.engine.models.transformer import PredictionBlock, Transformer, initial
from shoal.engine.parallel.context.apply import apply_context_parallel
from shoal.engine.parallel.context.token_order import TokenAssignment
from shoal.engine.parallel.embedding import EmbeddingTable
from shoal.engine.parallel.expert import apply_expert_parallel
from shoal.engine.parallel.float8.apply import Float8, apply_float8
from shoal.engine.parallel.linear import Linear
from shoal.engine.parallel.mixture_of_depths import apply_mixture_of_depths, assign_chosen
from shoal.engine.parallel.placement import ENDS, ParamPlacement
from shoal.engine.parallel.tensor import apply_tensor_parallel
from shoal.engine.parallel.weight_grad import GradSink
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.parallel.zero.zero3_hooks import PrefetchHooks
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.precision.policy import Policy
from shoal.pipeline.partition import assign_layers
from shoal.pipeline.program import Program, backward_follows
from shoal.spec.catalog import ModelShape


@dataclass
class LocalStage:
    """One pipeline stage on this rank: its modules and its parameters.

    Attributes:
        part: the part of the model that the stage computes; equals `index` unless the model has several copies.
        keeps_views: whether autograd keeps views of parameters for backward (`shoal.engine.weight_versions`).
    """

    keeps_views: ClassVar[bool] = False

    index: int
    part: int
    module: Transformer
    parameters: ShardedParameters

    def forward(self, batch: Batch, hidden: Tensor | None, part: Slice | None) -> Tensor:
        """Compute the stage for a micro-batch, or for a slice of it; see `Transformer.forward`."""
        samples = batch.samples if torch.is_grad_enabled() else None  # no random draws in validation
        return self.module(
            batch.tokens, batch.targets, batch.documents, hidden, part, samples,
            sequences=batch.sequences, labels=batch.labels, further=batch.further,
        )

    @property
    def further(self) -> int:
        """Modules of multi-token prediction in this stage."""
        return self.module.shape.mtp_depth if self.module.head is not None else 0


def build_stages(
    shape: ModelShape, program: Program, mesh: Mesh, policy: Policy, assignment: TokenAssignment,
    *, kernel: Kernel = "sdpa", seed: int = 0, compile: bool = False, cuda_graphs: bool = False,
    float8: Float8 | None = None, trained: bool = True,
) -> tuple[list[LocalStage], RankParameters]:
    """Build the stages that a program places on this rank; `initialise` or a checkpoint fills them.

    Args:
        assignment: assignment of the tokens of a sequence to the context-parallel ranks.
        compile: compile each layer, except its experts, and on the CPU the loss if it is not split.
        cuda_graphs: record what is compiled as CUDA graphs; `Runtime` then has to mark its steps.
        trained: whether the parameters get gradients.
    """
    position, holders = mesh.index("pp"), program.stage_rank
    # Group creation is collective: every rank creates these groups at the same point.
    ends = None
    if shape.shares_ends and program.depth > 1:
        places = sorted({rank for s, rank in enumerate(holders) if program.is_first(s) or program.is_last(s)})
        ends = mesh.group(f"pp:{','.join(map(str, places))}", purpose="ends")
    copies = ""
    if program.model_copies > 1:
        # The stages of a rank have their copies on one other rank.
        other = {holders[(mine + program.depth) % program.stages] for mine in program.rank_stages(position)}
        copies = f"pp:{','.join(map(str, sorted({position} | other)))}"
        mesh.group(copies)
    stages = [
        _build_stage(
            shape, stage, program, mesh, policy, assignment,
            copies=copies, kernel=kernel, seed=seed, compile=compile, cuda_graphs=cuda_graphs, float8=float8,
            trained=trained,
        )
        for stage in program.rank_stages(position)
    ]
    return stages, RankParameters([stage.parameters for stage in stages], ends)


def _build_stage(
    shape: ModelShape, stage: int, program: Program, mesh: Mesh, policy: Policy, assignment: TokenAssignment, *,
    copies: str, kernel: Kernel, seed: int, compile: bool, cuda_graphs: bool, float8: Float8 | None, trained: bool,
) -> LocalStage:
    """Build one stage and allocate this rank's shard of it."""
    layout, part, depth = mesh.layout, stage % program.depth, program.depth
    overlap = not (compile or float8) and layout.overlaps_products(background=mesh.device.type != "cpu")
    layers = assign_layers(shape, program)
    with on_meta():
        model = Transformer(
            shape, kernel=kernel, recompute=layout.recompute, seed=seed, layers=select_layers(shape, part, layers)
        )
    keep_stage(model, part, layers)  # first: parts of other stages need not be split
    sink = GradSink(defer=mesh.size("tp") > 1 and not overlap and not compile)
    placements = apply_tensor_parallel(model, shape, mesh, sink, overlap=overlap)
    chosen = assign_chosen(shape, mesh, assignment)
    placements |= apply_expert_parallel(model, shape, mesh, sink, assignment, chosen)
    placements = share_tied(placements, shape, part, depth)
    if copies:
        placements = share_copies(placements, copies, stage // depth)
    apply_context_parallel(model, mesh, assignment, chosen)
    apply_mixture_of_depths(model, mesh, assignment, chosen)
    if compile:
        prepare_compiler()
        compiled: list[tuple[nn.Module, str]] = []
        for layer in model.layers.values():
            if layer.sparse:  # the rows of each expert vary; experts have fused operators and grouped products
                layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)
            # The compiler takes recomputation as it is in one graph alone, which collectives and experts interrupt.
            inside = layer.recompute and (layer.sparse or mesh.size("tp") > 1)
            compiled.append((layer, "_forward" if inside else "forward"))
        # A split loss contains a collective, which cannot be compiled; on CUDA the loss has operators of its own.
        if mesh.size("tp") == 1 and mesh.device.type == "cpu":
            compiled.append((model.loss, "forward"))
        for module, name in compiled:  # not `Module.compile`, which also compiles the hooks that gather parameters
            mode = "reduce-overhead" if cuda_graphs else None
            setattr(module, name, torch.compile(getattr(module, name), dynamic=False, mode=mode))
    _receive_gradients(model, sink)
    # Last, therefore outermost: parameters are gathered before a layer is entered, recomputed or not.
    unclaimed = materialise(model, placements, policy.compute, mesh.device)
    units = _units(model)
    owned = [list(dict.fromkeys(p for module in modules for p in module.parameters())) for modules in units]
    parameters = ShardedParameters(  # a tied head belongs to the first unit
        [[(p, unclaimed.pop(p)) for p in unit if p in unclaimed] for unit in owned], mesh, policy, trained=trained
    )
    if float8:
        apply_float8(model, float8, placements, parameters, sink)
    if not cuda_graphs:  # a recorded backward cannot first overwrite a buffer and later add to it
        again: Counter[Tensor] = Counter()
        if model.end is not None and model.head is not None and model.embed is not None:
            again[model.head.weight] += shape.mtp_depth
            again[model.embed.token.weight] += shape.mtp_depth - (not model.first)
        sink.connect(parameters, model, again)
    if layout.zero == 3:
        follows = backward_follows(program.actions[program.stage_rank[stage]], stage)
        keep = int(follows) if layout.reshard_after_forward else None
        PrefetchHooks(zip(units, owned, strict=True), parameters, ahead=layout.prefetch, keep=keep)
    return LocalStage(stage, part, model, parameters)


def select_layers(shape: ModelShape, stage: int, layers: Sequence[range]) -> list[int]:
    """Return the layers of a stage, given every stage's range; the last has the modules of multi-token prediction."""
    last = stage == len(layers) - 1
    return [*layers[stage], *range(shape.layers, shape.blocks if last else shape.layers)]


def keep_stage(model: Transformer, stage: int, layers: Sequence[range]) -> None:
    """Remove from a model, in place, everything that other stages compute, given the layer range of every stage."""
    keep, last, shape = select_layers(model.shape, stage, layers), stage == len(layers) - 1, model.shape
    for name in list(model.layers):
        if int(name) not in keep:
            del model.layers[name]
    if stage > 0:
        model.first = False
        if not (last and shape.mtp_depth):
            model.embed = None
    if not last:
        model.norm = model.head = model.end = None


def share_tied(
    placements: dict[str, ParamPlacement], shape: ModelShape, stage: int, stages: int
) -> dict[str, ParamPlacement]:
    """Mark an embedding held by the first and the last stage: one parameter with two partial gradients."""
    if not shape.shares_ends or stages == 1:
        return placements
    name = "embed.token.weight"
    local = "head.weight" if stage > 0 and not shape.mtp_depth else name
    if local not in placements:
        return placements
    split = placements[local]
    shared = replace(
        split, name=name, sum_over=(*split.sum_over, ENDS), copies=2 * split.copies, stages=2 * split.stages,
        primary=split.primary and stage == 0,
    )
    return placements | {local: shared}


def share_copies(placements: dict[str, ParamPlacement], axis: str, copy: int) -> dict[str, ParamPlacement]:
    """Mark a stage's parameters as held by two model copies, each with the gradients of its micro-batches.

    Args:
        axis: mesh axis of the ranks that hold the copies of this stage.
    """
    return {
        local: replace(
            split, sum_over=split.sum_over if ENDS in split.sum_over else (*split.sum_over, axis),
            copies=2 * split.copies, stages=2 * split.stages, primary=split.primary and copy == 0,
        )
        for local, split in placements.items()
    }


def _receive_gradients(model: Transformer, sink: GradSink) -> None:
    """Replace unsplit layers by ones whose gradients go to ``sink``."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, Linear(module, sink))
        elif type(module) is nn.Embedding:
            model.set_submodule(name, EmbeddingTable(module, sink))


def initialise(parameters: RankParameters, shape: ModelShape, seed: int) -> None:
    """Fill this rank's shards with the model's initial values, a function of (seed, name, index)."""
    with torch.no_grad():
        for name, pieces in parameters.weights().items():
            for piece in pieces:
                fill(
                    piece.tensor, name=name, global_shape=piece.global_shape, box=piece.box,
                    initial=initial(name, shape), seed=seed,
                )
        parameters.gather()


def _units(model: Transformer) -> list[list[nn.Module]]:
    """Return the groups of modules that are gathered together, in forward order."""
    modules = [layer for layer in model.layers.values() if isinstance(layer, PredictionBlock)]
    units: list[list[nn.Module]] = [[layer] for layer in model.layers.values() if layer not in modules]
    if model.embed is not None and model.first:
        units.insert(0, [model.embed])
    if model.norm is not None and model.head is not None:
        units.append([model.norm, model.head])
        if model.end is not None and model.embed is not None:
            units[-1] = [model.end, *units[-1], *modules, model.embed, model.end]
    return units


def materialise(
    model: nn.Module, placements: dict[str, ParamPlacement], dtype: torch.dtype, device: torch.device
) -> dict[nn.Parameter, ParamPlacement]:
    """Replace parameters that have a placement by ones whose data the engine sets; meta ones cannot take real data.

    Returns:
        The placement of each new parameter.
    """
    named = {old: name for name, old in model.named_parameters() if name in placements}
    real = {old: nn.Parameter(torch.empty(0, dtype=dtype, device=device)) for old in named}
    for module in model.modules():
        for name, own in list(module._parameters.items()):
            if own in real:
                setattr(module, name, real[own])  # recurrent modules keep lists of their parameters too
    return {real[old]: placements[name] for old, name in named.items()}
