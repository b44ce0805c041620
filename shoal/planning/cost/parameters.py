"""Parameters of a pipeline stage on one tensor-parallel rank, with the local part of each.

Mirrors what `shoal.engine.parallel` builds, without building it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.base.boxes import Box
from shoal.pipeline.partition import assign_layers
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout


class StagePart(NamedTuple):
    """The part of a model on one pipeline stage."""

    layers: Sequence[int]  # layer numbers
    # first, last: True if it has the embedding, or the final norm and the head
    first: bool = True
    last: bool = True
    shared: bool = False  # True if the embedding is shared with another stage


def stage_parts(shape: ModelShape, program: Program) -> list[StagePart]:
    """Return the parts of all stages in order."""
    layers, depth = assign_layers(shape, program), program.depth
    shared = shape.shares_ends and depth > 1
    of_copy = [StagePart(layers[i], i == 0, i == depth - 1, shared) for i in range(depth)]
    return of_copy * program.model_copies


def rank_parts(shape: ModelShape, program: Program, pp_index: int) -> list[StagePart]:
    """Return the parts of the stages of one pipeline rank."""
    parts = stage_parts(shape, program)
    return [parts[stage] for stage in program.rank_stages(pp_index)]


class LocalParameter(NamedTuple):
    """One parameter on one rank."""

    name: str  # name in the model
    global_shape: tuple[int, ...]  # shape of the unsharded parameter
    box: Box  # local part
    allocated: int  # elements, padding included
    partial: str = ""  # the mesh axis over which its gradient is a partial sum, if any
    copies: int = 1  # number of tensor-parallel ranks with the same part
    alone: bool = False  # it has its own bucket
    expert: bool = False  # it is distributed over ranks like experts


Unit = list[LocalParameter]
"""Parameters that are gathered together: the embedding, a layer, or the final norm and the head."""
SPLITTING = ("tp", "tp_x", "sequence_parallel", "ep", "etp")  # all layout fields that `list_units` reads


def list_units(
    shape: ModelShape, layout: Layout, part: StagePart, tp_index: int = 0, ep_index: int = 0, etp_index: int = 0
) -> list[Unit]:
    """Return the parameters of a stage on one tensor-parallel rank, in forward order."""
    return _Rank(shape, layout, tp_index, ep_index, etp_index).units(part)


class _Rank:
    """The modules of a model on one tensor-parallel rank, as lists of parameters.

    A module's method takes its name; methods of single parameters say how these are split.
    """

    def __init__(self, shape: ModelShape, layout: Layout, tp_index: int, ep_index: int, etp_index: int) -> None:
        self.shape, self.layout = shape, layout
        self.tp_index, self.ep_index, self.etp_index = tp_index, ep_index, etp_index
        self.tp, self.x, self.y = layout.tp, layout.tp_x, layout.tp_y
        self.y_index, self.x_index = divmod(tp_index, self.x)  # grid indices; (tp_index, 0) in one dimension
        self.bias = shape.family == "gpt"
        self.summed = ("tp" if self.x == 1 else "tp_y") if self.tp > 1 and layout.sequence_parallel else ""

    def units(self, part: StagePart) -> list[Unit]:
        units = [self.embedding(part)] if part.first else []
        units += [list(self.layer(i)) for i in part.layers]
        return [*units, list(self.end(part))] if part.last else units

    def embedding(self, part: StagePart) -> Unit:
        h, positions = self.shape.hidden, self.shape.max_sequence
        tokens = self.rows("embed.token.weight", self.shape.vocab, h, alone=part.shared)
        return [tokens, *([self.replicated("embed.position.weight", positions, h)] if self.bias else [])]

    def end(self, part: StagePart) -> Iterator[LocalParameter]:
        """Final norm, head and prediction blocks; on a stage without the first embedding, a copy of it."""
        shape, h = self.shape, self.shape.hidden
        yield from self.norm("norm")
        if not shape.tied:
            yield self.rows("head.weight", shape.vocab, h)
        elif part.shared:
            yield self.rows("embed.token.weight", shape.vocab, h, alone=True)
        for i in range(shape.layers, shape.blocks):
            yield from self.layer(i)
            for name in ("embedding", "hidden", "last"):
                yield self.replicated(f"layers.{i}.{name}_norm.weight", h)
            yield self.replicated(f"layers.{i}.projection.weight", h, 2 * h)
        if shape.mtp_depth and part.shared and not shape.tied:
            yield self.rows("embed.token.weight", shape.vocab, h, alone=True)

    def layer(self, i: int) -> Iterator[LocalParameter]:
        shape, name = self.shape, f"layers.{i}"
        if shape.skips(i):
            yield self.replicated(f"{name}.depth.router", shape.hidden)
            yield self.replicated(f"{name}.depth.predictor_up", shape.mod.predictor, shape.hidden)
            yield self.replicated(f"{name}.depth.predictor_down", shape.mod.predictor)
        if shape.post_norm != "only":
            yield from self.norm(f"{name}.attention_norm")
        attention = self.attention if shape.latent is None else self.latent_attention
        yield from attention(f"{name}.attention")
        out_bias = self.bias or shape.out_bias
        yield from self.row_parallel(f"{name}.attention.out", shape.heads * shape.value_dim, out_bias)
        if shape.post_norm:
            yield from self.norm(f"{name}.attention_post_norm")
        if shape.post_norm != "only":
            yield from self.norm(f"{name}.mlp_norm")
        yield from self.routed(f"{name}.mlp") if shape.sparse(i) else self.mlp(f"{name}.mlp", shape.ffn)
        if shape.post_norm:
            yield from self.norm(f"{name}.mlp_post_norm")

    def attention(self, name: str) -> Iterator[LocalParameter]:
        shape, biased = self.shape, self.bias or self.shape.qkv_bias
        q, kv, parts = shape.heads * shape.query_dim, shape.kv_heads * shape.head_dim, min(self.tp, shape.kv_heads)
        yield from self.column_parallel(f"{name}.q", q, biased)
        yield from self.column_parallel(f"{name}.k", kv, biased, parts)
        yield from self.column_parallel(f"{name}.v", kv, biased, parts)
        if shape.joint_qk_norm:
            yield self.rows(f"{name}.q_norm.weight", q)
            yield self.rows(f"{name}.k_norm.weight", kv, parts=parts)
        elif shape.qk_norm and not shape.plain_qk_norm:
            yield self.head_norm(f"{name}.q_norm.weight")
            yield self.head_norm(f"{name}.k_norm.weight")
        if shape.sinks:
            yield self.rows(f"{name}.sinks.weight", shape.heads)

    def latent_attention(self, name: str) -> Iterator[LocalParameter]:
        shape, latent, h = self.shape, self.shape.latent, self.shape.hidden
        assert latent is not None
        q, rank, keys = shape.heads * shape.query_dim, latent.query_rank, latent.key_value_rank
        if rank is None:
            yield from self.column_parallel(f"{name}.q", q, self.bias)
        else:
            yield self.replicated(f"{name}.q_down.weight", rank, h)
        yield self.replicated(f"{name}.kv_down.weight", keys + latent.rotary_dim, h)
        if rank is not None:
            yield self.replicated(f"{name}.q_latent_norm.weight", rank)
            yield from self.column_parallel(f"{name}.q_up", q, self.bias, width=rank)
        yield self.replicated(f"{name}.kv_latent_norm.weight", keys)
        both = shape.heads * (shape.head_dim + shape.value_dim)
        yield from self.column_parallel(f"{name}.kv_up", both, self.bias, width=keys)

    def mlp(self, name: str, width: int) -> Iterator[LocalParameter]:
        for part in ("up",) if self.bias else ("gate", "up"):
            yield from self.column_parallel(f"{name}.{part}", width, self.bias)
        yield from self.row_parallel(f"{name}.down", width, self.bias)

    def routed(self, name: str) -> Iterator[LocalParameter]:
        """Router, experts and shared experts."""
        experts, h, layout = self.shape.moe, self.shape.hidden, self.layout
        scored: tuple[int, ...] = (experts.count, h)
        parts = {"router.weight": scored} | ({"router.noise": scored} if experts.gate == "noisy-top-k" else {})
        if experts.biases:
            parts = {"down_bias": scored, **parts, "router.logit_bias": (experts.count,)}
        for part, full in parts.items():
            yield self.shared(f"{name}.{part}", full)  # each rank scores its own tokens
        count, width = experts.count // layout.ep, experts.ffn // layout.expert_tensor
        first, start = self.ep_index * count, self.etp_index * width
        inner = ("up",) if self.bias else ("gate", "up")
        sizes: dict[str, tuple[Box, tuple[int, ...]]] = {}
        for part in inner:
            sizes[part] = Box((first, start, 0), (count, width, h)), (experts.count, experts.ffn, h)
        sizes["down"] = Box((first, 0, start), (count, h, width)), (experts.count, h, experts.ffn)
        for part in inner if experts.biases else ():
            sizes[f"{part}_bias"] = Box((first, start), (count, width)), (experts.count, experts.ffn)
        for part, (box, full) in sizes.items():
            yield LocalParameter(f"{name}.experts.{part}", full, box, box.numel, expert=True)
        if experts.shared:
            yield from self.mlp(f"{name}.shared", experts.shared * experts.ffn)

    def norm(self, name: str) -> Iterator[LocalParameter]:
        yield self.replicated(f"{name}.weight", self.shape.hidden)
        if self.bias:
            yield self.replicated(f"{name}.bias", self.shape.hidden)

    def column_parallel(
        self, name: str, size: int, bias: bool, parts: int | None = None, width: int | None = None
    ) -> Iterator[LocalParameter]:
        weight, parts, width = f"{name}.weight", parts or self.tp, width or self.shape.hidden
        yield self.rows(weight, size, width, parts=parts) if self.x == 1 else self.grid_rows(weight, size, parts)
        if bias:
            yield self.rows(f"{name}.bias", size, parts=parts)

    def row_parallel(self, name: str, size: int, bias: bool) -> Iterator[LocalParameter]:
        yield self.columns(f"{name}.weight", self.shape.hidden, size)
        if bias:
            yield self.replicated(f"{name}.bias", self.shape.hidden)

    def replicated(self, name: str, *size: int) -> LocalParameter:
        *others, last = size  # a grid splits the last dim, hidden
        box = Box((*(0 for _ in others), self.x_index * (last // self.x)), (*others, last // self.x))
        return LocalParameter(name, size, box, box.numel, self.summed, self.y)

    def rows(self, name: str, *size: int, parts: int | None = None, alone: bool = False) -> LocalParameter:
        parts = parts or self.tp
        by_token_id = name in ("embed.token.weight", "head.weight")
        copies, each = self.tp // parts, self.shape.vocabulary_rows(parts) if by_token_id else -(-size[0] // parts)
        start = min(self.tp_index // copies * each, size[0])
        box = Box((start, *(0 for _ in size[1:])), (min(each, size[0] - start), *size[1:]))
        partial = f"tp/{copies}" if copies > 1 else ""
        return LocalParameter(name, size, box, each * math.prod(size[1:]), partial, copies, alone)

    def columns(self, name: str, out: int, width: int) -> LocalParameter:
        rows, columns = out // self.x, width // self.y
        box = Box((self.x_index * rows, self.y_index * columns), (rows, columns))
        return LocalParameter(name, (out, width), box, box.numel)

    def grid_rows(self, name: str, size: int, parts: int) -> LocalParameter:
        """Split over the grid of 2D tensor parallelism."""
        h, parts = self.shape.hidden, min(self.y, parts)
        copies, each = self.y // parts, size // parts
        box = Box((self.y_index // copies * each, self.x_index * (h // self.x)), (each, h // self.x))
        return LocalParameter(name, (size, h), box, box.numel, f"tp_y/{copies}" if copies > 1 else "", copies)

    def head_norm(self, name: str) -> LocalParameter:
        return self.shared(name, (self.shape.head_dim,))

    def shared(self, name: str, size: tuple[int, ...]) -> LocalParameter:
        """Replicated; each rank has the gradient of its own heads or tokens."""
        return LocalParameter(name, size, Box.full(size), math.prod(size), "tp" if self.tp > 1 else "", self.tp)
