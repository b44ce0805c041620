"""Apply context parallelism to a model: positions, mask and attention.

Each rank holds a part of every sequence. Embeddings, norms, feed-forward blocks, the head and the loss process tokens
independently and stay unchanged. These modules are replaced:

    positions    of this rank's tokens, which are not consecutive
    mask         a `CausalBlocks` instead of a matrix
    core         attention: head-token exchange among the ranks of a ring position (`ulysses`), then the ring (`ring`)

The combination is the "unified sequence parallelism" of Fang & Zhao 2024.
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
    """This rank's position among the ranks that share each sequence.

    Attributes:
        rank: index along the mesh's cp axis.
        spread: assignment of tokens to ranks.
    """

    rank: int
    spread: TokenAssignment
    ring: RingPosition
    ulysses: Ulysses

    def positions(self, start: int, s: int, device: torch.device) -> Tensor:
        """Return the positions of s of this rank's tokens that follow ``start`` others of its own."""
        return places_of(self.spread.chunks(self.rank), device)[start : start + s]

    def slices(self, start: int, s: int) -> range:
        """Return the slices that hold these tokens: one, or all."""
        ends = [0, *accumulate(self.spread.lengths(self.rank))]
        return range(ends.index(start), ends.index(start + s))

    def sight(self, start: int, s: int, documents: Tensor | None, device: torch.device) -> CausalBlocks:
        """Return which earlier tokens these tokens may attend to; arguments as in `Mask`."""
        slices = self.slices(start, s)
        keys = [self.spread.place_chunks(place, range(slices.stop)) for place in range(self.spread.ring)]
        return CausalBlocks(self.spread.place_chunks(self.ring.place, slices), keys, documents)

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sight: CausalBlocks) -> Tensor:
        """Compute attention of this rank's tokens to all tokens that they see.

        Args:
            q: [b, a, s, d], the tokens of this forward pass.
            k, v: [b, k, t, d], of these tokens and of earlier slices.
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
    """Replace modules of a model, in place, so that sequences are split over the mesh's cp axis.

    Args:
        model: a `Transformer`, or the part of one in a pipeline stage.
        spread: assignment of the tokens of a sequence to the ranks.
        chosen: the same for the tokens chosen in Mixture-of-Depths layers.
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
    """`Positions` of this rank's tokens."""

    def __init__(self, at: ContextParallel):
        super().__init__()
        self.at = at

    def forward(self, start: int, s: int, device: torch.device) -> Tensor:
        return self.at.positions(start, s, device)


class ContextMask(nn.Module):
    """`Mask` of this rank's tokens, as `CausalBlocks`."""

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
