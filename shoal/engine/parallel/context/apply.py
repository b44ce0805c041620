"""Context parallelism of a model: what of it depends on where a token is, and attention.

A rank has a part of every sequence. Embeddings, norms, feed-forward blocks, the head and the loss take each token by
itself, so they need not know. What does:

    positions    of this rank's tokens, which are not consecutive
    mask         not a matrix, but what each place of the ring sees of each other (`CausalBlocks`)
    core         attention: heads for tokens among the ranks at one place (`ulysses`), then round the ring (`ring`)

Both together are the "unified sequence parallelism" of Fang & Zhao 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.attention import Kernel
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.context.causal_blocks import CausalBlocks, places_of
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import TokenAssignment
from shoal.engine.parallel.context.ulysses import Ulysses


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place among those that share each sequence.

    Attributes:
        rank: its place along the mesh's cp axis.
        spread: who has which tokens.
    """

    rank: int
    spread: TokenAssignment
    ring: RingPosition
    ulysses: Ulysses

    def positions(self, start: int, s: int, device: torch.device) -> Tensor:
        """As `Positions`, of s of this rank's tokens after ``start`` others of its own."""
        return places_of(self.spread.chunks(self.rank), device)[start : start + s]

    def slices(self, start: int, s: int) -> range:
        """Of which slices these are the tokens: of one, or of all."""
        ends = [0, *accumulate(self.spread.lengths(self.rank))]
        return range(ends.index(start), ends.index(start + s))

    def sight(self, start: int, s: int, documents: Tensor | None, device: torch.device) -> CausalBlocks:
        """As `Mask`: what these tokens see of all up to them."""
        slices = self.slices(start, s)
        keys = [self.spread.place_chunks(place, range(slices.stop)) for place in range(self.spread.ring)]
        return CausalBlocks(self.spread.place_chunks(self.ring.place, slices), keys, documents)

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sight: CausalBlocks) -> Tensor:
        """As `AttentionCore`, of this rank's tokens to all that they see.

        Args:
            q: [b, a, s, d], the tokens of this forward pass.
            k, v: [b, k, t, d], these and those of the slices before.
        """
        s, t = q.shape[2], k.shape[2]
        slices = self.slices(t - s, s)
        queries, keys = (self.spread.place_lengths(self.ring.place, some) for some in (slices, range(slices.stop)))
        q, k, v = self.ulysses.heads_for_tokens(q, k, v, queries, keys)
        out = RingAttention.apply(q, k, v, self.ring, sight, kernel)
        return self.ulysses.tokens_for_heads(out, queries)


def apply_context_parallel(
    model: Transformer, mesh: Mesh, spread: TokenAssignment, chosen: TokenAssignment | None = None
) -> None:
    """Have a model, in place, take a part of each sequence over the mesh's cp axis.

    Args:
        model: a `Transformer`, or the part of one that a pipeline stage keeps.
        spread: of the sequences.
        chosen: of those tokens that pass through layers which take some.
    """
    if mesh.size("cp") == 1:
        return
    at = ContextParallel(mesh.index("cp"), spread, RingPosition.of(mesh), Ulysses.of(mesh))
    model.set_submodule("positions", ContextPositions(at))
    model.set_submodule("mask", ContextMask(at))
    for layer in model.layers.values():
        here = at if layer.depth is None or chosen is None else replace(at, spread=chosen)
        layer.attention.set_submodule("core", ContextAttention(here, layer.attention.core.kernel))
        if layer.depth is not None:
            layer.depth.set_submodule("mask", ContextMask(here))


class ContextPositions(nn.Module):
    """`Positions` of a rank's own tokens."""

    def __init__(self, at: ContextParallel):
        super().__init__()
        self.at = at

    def forward(self, start: int, s: int, device: torch.device) -> Tensor:
        return self.at.positions(start, s, device)


class ContextMask(nn.Module):
    """`Mask` of a rank's own tokens: a `CausalBlocks`."""

    def __init__(self, at: ContextParallel):
        super().__init__()
        self.at = at

    def forward(self, start: int, s: int, documents: Tensor | None, device: torch.device) -> CausalBlocks:
        return self.at.sight(start, s, documents, device)


class ContextAttention(nn.Module):
    """`AttentionCore` over the tokens of all ranks."""

    def __init__(self, at: ContextParallel, kernel: Kernel):
        super().__init__()
        self.at, self.kernel = at, kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalBlocks) -> Tensor:
        return self.at.attend(self.kernel, q, k, v, mask)
