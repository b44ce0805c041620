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
    h, bias = shape.hidden, shape.family == "gpt"
    q, kv, latent = shape.heads * shape.query_dim, shape.kv_heads * shape.head_dim, shape.latent
    tp, group = layout.tp, min(layout.tp, shape.kv_heads)
    y, x = layout.tp_y, layout.tp_x
    y_index, x_index = divmod(tp_index, x)  # grid indices; (tp_index, 0) in one dimension
    summed = ("tp" if x == 1 else "tp_y") if tp > 1 and layout.sequence_parallel else ""

    def replicated(name: str, *size: int) -> LocalParameter:
        *others, last = size  # a grid splits the last dim, hidden
        box = Box((*(0 for _ in others), x_index * (last // x)), (*others, last // x))
        return LocalParameter(name, size, box, box.numel, summed, y)

    def rows(name: str, *size: int, parts: int = tp, alone: bool = False) -> LocalParameter:
        by_token_id = name in ("embed.token.weight", "head.weight")
        copies, each = tp // parts, shape.vocabulary_rows(parts) if by_token_id else -(-size[0] // parts)
        start = min(tp_index // copies * each, size[0])
        box = Box((start, *(0 for _ in size[1:])), (min(each, size[0] - start), *size[1:]))
        partial = f"tp/{copies}" if copies > 1 else ""
        return LocalParameter(name, size, box, each * math.prod(size[1:]), partial, copies, alone)

    def columns(name: str, out: int, width: int) -> LocalParameter:
        box = Box((x_index * (out // x), y_index * (width // y)), (out // x, width // y))
        return LocalParameter(name, (out, width), box, box.numel)

    def norm(name: str) -> Iterator[LocalParameter]:
        yield replicated(f"{name}.weight", h)
        if bias:
            yield replicated(f"{name}.bias", h)

    def grid_rows(name: str, size: int, parts: int) -> LocalParameter:
        copies, each = y // min(y, parts), size // min(y, parts)
        box = Box((y_index // copies * each, x_index * (h // x)), (each, h // x))
        return LocalParameter(name, (size, h), box, box.numel, f"tp_y/{copies}" if copies > 1 else "", copies)

    def head_norm(name: str) -> LocalParameter:
        return LocalParameter(name, (d := (shape.head_dim,)), Box.full(d), *d, "tp" if tp > 1 else "", tp)

    def column_parallel(
        name: str, size: int, parts: int = tp, bias: bool = bias, width: int = h
    ) -> Iterator[LocalParameter]:
        weight = f"{name}.weight"
        yield rows(weight, size, width, parts=parts) if x == 1 else grid_rows(weight, size, parts)
        if bias:
            yield rows(f"{name}.bias", size, parts=parts)

    def row_parallel(name: str, size: int, bias: bool = bias) -> Iterator[LocalParameter]:
        yield columns(f"{name}.weight", h, size)
        if bias:
            yield replicated(f"{name}.bias", h)

    def layer(i: int) -> Iterator[LocalParameter]:
        if shape.skips(i):
            width = shape.mod.predictor
            yield replicated(f"layers.{i}.depth.router", h)
            yield replicated(f"layers.{i}.depth.predictor_up", width, h)
            yield replicated(f"layers.{i}.depth.predictor_down", width)
        if shape.post_norm != "only":
            yield from norm(f"layers.{i}.attention_norm")
        yield from attention(f"layers.{i}.attention") if latent is None else latent_attention(f"layers.{i}.attention")
        out_bias = bias or shape.out_bias
        yield from row_parallel(f"layers.{i}.attention.out", shape.heads * shape.value_dim, out_bias)
        if shape.post_norm:
            yield from norm(f"layers.{i}.attention_post_norm")
        if shape.post_norm != "only":
            yield from norm(f"layers.{i}.mlp_norm")
        yield from routed(i) if shape.sparse(i) else block(f"layers.{i}.mlp", shape.ffn)
        if shape.post_norm:
            yield from norm(f"layers.{i}.mlp_post_norm")

    def routed(i: int) -> Iterator[LocalParameter]:
        experts, name = shape.moe, f"layers.{i}.mlp"
        scored: tuple[int, ...] = (experts.count, h)
        parts = {"router.weight": scored} | ({"router.noise": scored} if experts.gate == "noisy-top-k" else {})
        if experts.biases:
            parts = {"down_bias": scored, **parts, "router.logit_bias": (experts.count,)}
        for part, full in parts.items():
            partial = "tp" if tp > 1 else ""  # each rank scores its own tokens
            yield LocalParameter(f"{name}.{part}", full, Box.full(full), math.prod(full), partial, tp)
        count, width = experts.count // layout.ep, experts.ffn // layout.expert_tensor
        for part in ("up", "down") if bias else ("gate", "up", "down"):
            down = part == "down"
            size = (experts.count, h, experts.ffn) if down else (experts.count, experts.ffn, h)
            offset = (ep_index * count, 0, etp_index * width) if down else (ep_index * count, etp_index * width, 0)
            box = Box(offset, (count, h, width) if down else (count, width, h))
            yield LocalParameter(f"{name}.experts.{part}", size, box, box.numel, expert=True)
        for part in (("up",) if bias else ("gate", "up")) if experts.biases else ():
            box = Box((ep_index * count, etp_index * width), (count, width))
            yield LocalParameter(
                f"{name}.experts.{part}_bias", (experts.count, experts.ffn), box, box.numel, expert=True
            )
        if experts.shared:
            yield from block(f"{name}.shared", experts.shared * experts.ffn)

    def attention(name: str) -> Iterator[LocalParameter]:
        biased = bias or shape.qkv_bias
        yield from column_parallel(f"{name}.q", q, bias=biased)
        yield from column_parallel(f"{name}.k", kv, group, biased)
        yield from column_parallel(f"{name}.v", kv, group, biased)
        if shape.joint_qk_norm:
            yield rows(f"{name}.q_norm.weight", q)
            yield rows(f"{name}.k_norm.weight", kv, parts=group)
        elif shape.qk_norm and not shape.plain_qk_norm:
            yield head_norm(f"{name}.q_norm.weight")
            yield head_norm(f"{name}.k_norm.weight")
        if shape.sinks:
            yield rows(f"{name}.sinks.weight", shape.heads)

    def latent_attention(name: str) -> Iterator[LocalParameter]:
        assert latent is not None
        rank, keys = latent.query_rank, latent.key_value_rank
        if rank is None:
            yield from column_parallel(f"{name}.q", q)
        else:
            yield replicated(f"{name}.q_down.weight", rank, h)
        yield replicated(f"{name}.kv_down.weight", keys + latent.rotary_dim, h)
        if rank is not None:
            yield replicated(f"{name}.q_latent_norm.weight", rank)
            yield from column_parallel(f"{name}.q_up", q, width=rank)
        yield replicated(f"{name}.kv_latent_norm.weight", keys)
        yield from column_parallel(f"{name}.kv_up", shape.heads * (shape.head_dim + shape.value_dim), width=keys)

    def block(name: str, width: int) -> Iterator[LocalParameter]:
        for part in ("up",) if bias else ("gate", "up"):
            yield from column_parallel(f"{name}.{part}", width)
        yield from row_parallel(f"{name}.down", width)

    units = []
    if part.first:
        embed = [rows("embed.token.weight", shape.vocab, h, alone=part.shared)]
        units.append(embed + ([replicated("embed.position.weight", shape.max_sequence, h)] if bias else []))
    units += [list(layer(i)) for i in part.layers]
    if part.last:
        last = list(norm("norm"))
        if not shape.tied:
            last.append(rows("head.weight", shape.vocab, h))
        elif part.shared:
            last.append(rows("embed.token.weight", shape.vocab, h, alone=True))
        for i in range(shape.layers, shape.blocks):
            last += layer(i)
            last += [replicated(f"layers.{i}.{name}_norm.weight", h) for name in ("embedding", "hidden", "last")]
            last.append(replicated(f"layers.{i}.projection.weight", h, 2 * h))
        if shape.mtp_depth and part.shared and not shape.tied:
            last.append(rows("embed.token.weight", shape.vocab, h, alone=True))
        units.append(last)
    return units
