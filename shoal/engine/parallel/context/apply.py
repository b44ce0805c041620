"""Apply context parallelism to a model: positions, mask and attention.

Each rank holds a part of every sequence. Embeddings, norms, feed-forward blocks, the head and the loss process tokens
independently and stay unchanged. These modules are replaced:

    positions    of this rank's tokens, which are not consecutive
    mask         a `CausalBlocks` instead of a matrix
    core         attention: head-token exchange among the ranks of a ring position (Ulysses), then the ring (`ring`)

The combination is the "unified sequence parallelism" of Fang & Zhao 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.engine import kernels
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_to_all_dims
from shoal.engine.models.attention import AttentionCore, cut_chunks
from shoal.engine.models.attention_kernels import takes_lengths
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.context.causal_blocks import CausalBlocks, token_positions
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import TokenAssignment

HEADS, TOKENS = 1, 2  # dims of [b, a, s, d]


@dataclass(frozen=True)
class ContextParallel:
    """This rank's position among the ranks that share each sequence.

    Attributes:
        rank: index along the mesh's cp axis.
        ulysses: the ranks at this ring position; None for a single one.
    """

    rank: int
    tokens: TokenAssignment
    ring: RingPosition
    ulysses: Group | None

    def slices(self, start: int, s: int) -> range:
        """Return the slices that hold s of this rank's tokens after ``start`` others: one, or all."""
        ends = [0, *accumulate(self.tokens.lengths(self.rank))]
        return range(ends.index(start), ends.index(start + s))


def apply_context_parallel(
    model: Transformer, mesh: Mesh, tokens: TokenAssignment, chosen: TokenAssignment | None = None
) -> None:
    """Replace modules of a model, in place, so that sequences are split over the mesh's cp axis.

    Args:
        tokens: assignment of the tokens of a sequence to the ranks.
        chosen: the same for the tokens chosen in Mixture-of-Depths layers.
    """
    if mesh.size("cp") == 1:
        return
    at = ContextParallel(mesh.index("cp"), tokens, RingPosition.from_mesh(mesh), mesh.group("ulysses"))
    model.set_submodule("positions", ContextPositions(at))
    fused_width = model.mask.fused_width
    model.set_submodule("mask", ContextMask(at, fused_width))
    if model.local_mask is not None:
        local = model.local_mask
        model.set_submodule("local_mask", ContextMask(at, fused_width, local.window, local.chunked))
    for layer in model.layers.values():
        own = at if layer.depth is None or chosen is None else replace(at, tokens=chosen)
        layer.attention.set_submodule("core", ContextAttention(own, layer.attention.core))
        if layer.depth is not None:
            layer.depth.set_submodule("mask", ContextMask(own, fused_width))


class ContextModule(nn.Module):
    """Module that knows the tokens of this rank."""

    def __init__(self, at: ContextParallel):
        super().__init__()
        self.at = at


class ContextPositions(ContextModule):
    """`Positions` of this rank's tokens."""

    def forward(self, start: int, s: int, device: torch.device) -> Tensor:
        return token_positions(self.at.tokens.chunks(self.at.rank), device)[start : start + s]


class ContextMask(ContextModule):
    """`Mask` of this rank's tokens, as `CausalBlocks`.

    Args:
        fused_width: width of the heads of fused attention; None is explicit attention.
        window: tokens that a query sees, its own included; None for all.
        chunked: the window cuts sequences into chunks, and attention stays inside a chunk too.
    """

    def __init__(
        self, at: ContextParallel, fused_width: int | None = None, window: int | None = None, chunked: bool = False
    ):
        super().__init__(at)
        self.fused_width, self.window, self.chunked = fused_width, window, chunked

    def forward(self, start: int, s: int, documents: Tensor | None, x: Tensor) -> CausalBlocks:
        tokens, slices = self.at.tokens, self.at.slices(start, s)
        keys = [tokens.ring_chunks(position, range(slices.stop)) for position in range(tokens.ring)]
        by_lengths = self.fused_width is not None and takes_lengths(x.device, x.dtype, self.fused_width)
        queries = tokens.ring_chunks(self.at.ring.index, slices)
        if self.window and self.chunked:
            documents = cut_chunks(documents, self.window, max(some[-1] + 1 for each in keys for some in each), len(x))
        return CausalBlocks(queries, keys, documents, x.device, by_lengths=by_lengths, window=self.window)


class ContextAttention(ContextModule):
    """Attention core over the tokens of all ranks, in place of one over a rank's own."""

    def __init__(self, at: ContextParallel, core: AttentionCore):
        super().__init__(at)
        self.core = core

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: CausalBlocks, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention of this rank's tokens to all tokens that they see.

        Args:
            q: [b, a, s, d], the tokens of this forward pass.
            k, v: [b, k, t, d], of these tokens and of earlier slices.
            sinks: [a], one more score of each head.
        """
        at, s, t = self.at, q.shape[2], k.shape[2]
        slices = at.slices(t - s, s)
        queries, keys = (at.tokens.ring_lengths(at.ring.index, some) for some in (slices, range(slices.stop)))
        q, k, v = heads_for_tokens(q, k, v, queries, keys, at.ulysses)
        if sinks is not None and at.ulysses is not None:
            sinks = sinks.chunk(at.ulysses.size())[at.ulysses.rank()]
        block = mask.only_block() if kernels.use_fused(q) else None
        if block is None:
            out = RingAttention.apply(q, k, v, at.ring, mask, self.core.kernel, self.core.softcap, sinks)
        else:  # no partial results, so any kernel will do
            out = self.core(q, k, v, mask.mask(block, 0), sinks)
        return tokens_for_heads(out, queries, at.ulysses)


# ---- Ulysses attention (Jacobs et al. 2023, "DeepSpeed Ulysses") ----------------------------------------------------
# Ranks hold all heads of some tokens. An all-to-all gives each rank some heads of all tokens for attention, and another
# reverses it. With more ranks than key/value heads, each of these goes to several ranks.


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int], group: Group | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads before attention, over the n ranks of a group.

    q changes from [b, a, s, d] to [b, a/n, sum of queries, d], k and v from [b, k, t, d] to
    [b, max(k/n, 1), sum of keys, d].

    Args:
        queries, keys: number of tokens of each rank.
    """
    if group is None:
        return q, k, v
    n = group.size()
    if k.shape[HEADS] < n:
        k, v = (x.repeat_interleave(n // x.shape[HEADS], dim=HEADS) for x in (k, v))
    # The key and value heads of each rank are adjacent, so one exchange moves both.
    both = torch.cat([x.unflatten(HEADS, (n, -1)) for x in (k, v)], dim=2).flatten(1, 2)
    q, both = (
        all_to_all_dims(x, group, HEADS, TOKENS, [x.shape[HEADS] // n] * n, lengths)
        for x, lengths in ((q, queries), (both, keys))
    )
    k, v = both.chunk(2, dim=HEADS)
    return q, k, v


def tokens_for_heads(out: Tensor, queries: Sequence[int], group: Group | None) -> Tensor:
    """Exchange [b, a/n, sum of queries, d] back for [b, a, s, d]."""
    if group is None:
        return out
    return all_to_all_dims(out, group, TOKENS, HEADS, queries, [out.shape[HEADS]] * group.size())
