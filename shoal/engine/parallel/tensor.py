"""Tensor parallelism: tables of the split layers that replace each layer of a model.

`shoal.engine.parallel.linear` defines the layers, and `shoal.engine.parallel.tensor_2d` those over a grid of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.attention import Sinks
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.embedding import SequenceEmbedding, VocabularyEmbedding, VocabularyLoss
from shoal.engine.parallel.linear import (
    BY_TOKEN_ID,
    ColumnLinear,
    GatheredLatents,
    HeadsLinear,
    JointNorm,
    KVColumnLinear,
    RowLinear,
    TensorParallel,
    keep_rows,
)
from shoal.engine.parallel.placement import ParamPlacement, replicate
from shoal.engine.parallel.symmetric import is_available
from shoal.engine.parallel.tensor_2d import (
    ColumnLinear2D,
    Grid,
    KVColumnLinear2D,
    Norm2D,
    PositionEmbedding2D,
    RowLinear2D,
)
from shoal.engine.parallel.weight_grad import GradSink
from shoal.spec.catalog import ModelShape

ParallelStyle = Callable[[Any, str, Any], Any]
"""Constructor of a split module from the unsplit one, its name in the full model and this rank's `TensorParallel`. The
result has the placements of its parameters as ``placements``."""


class HeadSinks(Sinks):
    """Sinks of this rank's heads."""

    def __init__(self, unsplit: Sinks, name: str, at: TensorParallel):
        super(Sinks, self).__init__()
        self.weight = unsplit.weight
        self.placements = [keep_rows(self, name, "weight", at, at.size)]


TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "embed.token": VocabularyEmbedding,
    "embed.position": SequenceEmbedding,
    "layers.*.attention.q": ColumnLinear,  # split by heads, so no collective is needed until `out`
    "layers.*.attention.{k,v}": KVColumnLinear,
    "layers.*.attention.{q_norm,k_norm}": JointNorm,
    "layers.*.attention.sinks": HeadSinks,
    "layers.*.attention.shared": GatheredLatents,  # of every token, computed from the rank's tokens
    "layers.*.attention.{q_up,kv_up}": HeadsLinear,
    "layers.*.attention.out": RowLinear,
    "layers.*.mlp.{gate,up}": ColumnLinear,
    "layers.*.mlp.down": RowLinear,
    "layers.*.mlp.shared.{gate,up}": ColumnLinear,
    "layers.*.mlp.shared.down": RowLinear,
    "head": ColumnLinear,
    "loss": VocabularyLoss,
}

TENSOR_PARALLEL_2D: dict[str, ParallelStyle] = {
    "embed.token": VocabularyEmbedding,
    "embed.position": PositionEmbedding2D,
    "layers.*.{attention_norm,attention_post_norm,mlp_norm,mlp_post_norm}": Norm2D,
    "layers.*.attention.q": ColumnLinear2D,
    "layers.*.attention.{k,v}": KVColumnLinear2D,
    "layers.*.attention.out": RowLinear2D,
    "layers.*.mlp.{gate,up}": ColumnLinear2D,
    "layers.*.mlp.down": RowLinear2D,
    "norm": Norm2D,
    "head": ColumnLinear,
    "loss": VocabularyLoss,
}


def apply_tensor_parallel(
    model: Transformer, shape: ModelShape, mesh: Mesh, sink: GradSink | None = None, *, overlap: bool = False
) -> dict[str, ParamPlacement]:
    """Split a model on the meta device in place over the mesh's tp axis.

    Args:
        overlap: overlap products with collectives, chunk by chunk.

    Returns:
        Placement of each parameter, by name. Parameters without a rule are replicated. With sequence parallelism their
        gradients are partial sums, because each rank sees its own part of the sequence; the gradients of norms of
        queries and keys always are, because each rank sees its own heads.
    """
    group, rank, size = mesh.group("tp"), mesh.index("tp"), mesh.size("tp")
    in_parts, placements = mesh.layout.sequence_parallel, dict[str, ParamPlacement]()
    again = mesh.layout.recompute != "full"
    if group is not None:
        sink = sink or GradSink()
        if mesh.layout.tp_x > 1:
            x, y = mesh.required_group("tp_x"), mesh.required_group("tp_y")
            grid = Grid(group, rank, size, in_parts, shape, sink, y, again=again, x=x)
            placements = _replace(model, TENSOR_PARALLEL_2D, grid)
        else:
            asked = overlap and in_parts and mesh.layout.tp_overlap is True
            symmetric = asked and is_available(group, mesh.device)
            at = TensorParallel(group, rank, size, in_parts, shape, sink, group, overlap, symmetric, again)
            placements = _replace(model, TENSOR_PARALLEL, at)
    for name, parameter in model.named_parameters():
        if name not in placements:
            by_head = mesh.size("tp") > 1 and name.endswith(("q_norm.weight", "k_norm.weight"))
            placements[name] = replicate(name, parameter, mesh, partial=in_parts or by_head)
    if mesh.size("tp") == 1:
        _pad_vocabulary(model, shape, placements)
    return {name: placements[name] for name, _ in model.named_parameters()}


def _pad_vocabulary(model: Transformer, shape: ModelShape, placements: dict[str, ParamPlacement]) -> None:
    """Add rows without a token id to unsplit matrices, in place (`ModelShape.vocabulary_rows`)."""
    rows = shape.vocabulary_rows(1)
    for name in BY_TOKEN_ID:
        if (placed := placements.get(f"{name}.weight")) is not None:
            module: Any = model.get_submodule(name)
            module.weight = nn.Parameter(module.weight.new_empty(rows, shape.hidden))
            placements[f"{name}.weight"] = replace(placed, local=(rows, shape.hidden))
    model.loss.columns = shape.vocab
    _tie(model, shape)


def _tie(model: Transformer, shape: ModelShape) -> None:
    if shape.tied and model.embed is not None and model.head is not None:
        model.head.weight = model.embed.token.weight


def _replace(
    model: Transformer, table: Mapping[str, ParallelStyle], at: TensorParallel
) -> dict[str, ParamPlacement]:
    """Replace the modules named in a table; return the placements of their parameters, by name."""
    placements: dict[str, ParamPlacement] = {}
    for name, module in list(model.named_modules()):
        for pattern, style in table.items():
            if matches(pattern, name):
                if isinstance(module, nn.Identity) or (style is JointNorm and not at.shape.joint_qk_norm):
                    continue
                split = style(module, name, at)
                model.set_submodule(name, split)
                placements |= {placement.name: placement for placement in split.placements}
    _tie(model, at.shape)
    return placements


def matches(pattern: str, name: str) -> bool:
    """Return whether a module name matches a pattern: ``*`` is one component, ``{a,b}`` a choice.

    >>> matches("layers.*.attention.{k,v}", "layers.3.attention.k"), matches("layers.*", "layers.3.mlp")
    (True, False)
    """
    choices = [part.strip("{}").split(",") for part in pattern.split(".")]
    parts = name.split(".")
    return len(parts) == len(choices) and all(p in c or c == ["*"] for p, c in zip(parts, choices, strict=True))
