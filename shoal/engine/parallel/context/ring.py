"""Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context").

Each place of the ring keeps its queries. The keys and values of all places go round: while a place computes with those
of one, the next are on their way. What it has so far of the softmax is merged with each block's (`kernels`). So no
place ever holds more than two places' keys, and no scores at all.

Backward sends keys and values round once more. The gradients of each block go one place behind it: a place adds its
part to what has come from the places before and sends it on, and the last one sends it home. Only key/value heads
travel, fewer than the query heads that share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, start_shift
from shoal.engine.models.attention import Kernel
from shoal.engine.parallel.context.causal_blocks import CausalBlocks
from shoal.engine.parallel.context.kernels import attend, attend_backward
from shoal.engine.parallel.context.token_order import count


@dataclass(frozen=True)
class RingPosition:
    """This rank's place.

    Attributes:
        place, places: which, of how many.
        ranks: the global ranks of all of them, in order.
        blocks: for keys and values; None where there is one place.
        gradients: for their gradients, which go the same way and are not to wait for them.
    """

    place: int
    places: int
    ranks: Sequence[int]
    blocks: Group | None
    gradients: Group | None

    @classmethod
    def of(cls, mesh: Mesh) -> RingPosition:
        """Of a mesh. To be called by all ranks at the same point."""
        return cls(
            mesh.index("ring"), mesh.size("ring"), mesh.ranks("ring"),
            mesh.group("ring", purpose="blocks"), mesh.group("ring", purpose="block gradients"),
        )

    def shift(self, x: Tensor, out: Tensor, group: Group | None) -> Pending:
        """Send to the next place and receive from the one before, of several."""
        assert group is not None
        return start_shift(x, self.ranks[(self.place + 1) % self.places], out, self.ranks[self.place - 1], group)

    def blocks_of(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Every place's block, this one's first; the next is on its way while one is used.

        Args:
            held: [2, b, k, t, d], this place's keys and values.
            lengths: t of every place.

        Yields:
            (its place, the block).
        """
        for step in range(self.places):
            source, coming = (self.place - step) % self.places, None
            if step + 1 < self.places:
                following = _resized(held, lengths[source - 1])
                coming = self.shift(held, following, self.blocks)
            yield source, held
            if coming is not None:
                coming.wait()
                held = following


class RingAttention(torch.autograd.Function):
    """Attention of this place's queries to the keys of all places."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, ring: RingPosition, sight: CausalBlocks, kernel: Kernel
    ) -> Tensor:
        """softmax(q k^T / sqrt(d)) v.

        Args:
            q: [b, a, n, d], this place's queries, in the order of ``sight.queries``.
            k, v: [b, k, t, d], its keys and values, in the order of its ``sight.keys``.

        Returns:
            [b, a, n, d].
        """
        q, held = q.contiguous(), torch.stack((k, v))
        exact = torch.promote_types(q.dtype, torch.float32)
        b, a, n, d = q.shape
        # Heads inside tokens, as what follows reads it: then that is no copy.
        out = torch.zeros(b, n, a, d, dtype=exact, device=q.device).transpose(1, 2)
        total = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        for place, (keys, values) in ring.blocks_of(held, _lengths(sight)):
            for piece in sight.pieces(place):
                merge(
                    out[:, :, piece.rows], total[:, :, piece.rows],
                    *attend(
                        q[:, :, piece.rows], keys[:, :, piece.columns], values[:, :, piece.columns],
                        sight.mask(piece, place), causal=piece.causal, kernel=kernel,
                    ),
                )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, held, out, total)
        ctx.ring, ctx.sight, ctx.kernel = ring, sight, kernel
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, held, out, total = ctx.saved_tensors
        ring, sight, kernel = ctx.ring, ctx.sight, ctx.kernel
        gradient = gradient.contiguous()
        d_q, home = torch.zeros_like(q, dtype=total.dtype), torch.zeros_like(held, dtype=total.dtype)
        lengths, coming, before = _lengths(sight), None, None
        for place, block in ring.blocks_of(held, lengths):
            d_block = home if place == ring.place else torch.zeros_like(block, dtype=total.dtype)
            for piece in sight.pieces(place):
                rows, columns = piece.rows, piece.columns
                found = attend_backward(
                    gradient[:, :, rows], q[:, :, rows], block[0, :, :, columns], block[1, :, :, columns],
                    out[:, :, rows], total[:, :, rows], sight.mask(piece, place), causal=piece.causal, kernel=kernel,
                )
                for whole, part in zip((d_q[:, :, rows], *d_block[:, :, :, columns].unbind(0)), found, strict=True):
                    whole += part
                del found, part  # before the next piece has its own
            if place == ring.place:
                continue
            if coming is not None and before is not None:  # the one brings the other
                coming.wait()
                d_block += before
            before = _resized(d_block, lengths[place - 1])
            coming = ring.shift(d_block, before, ring.gradients)
        if coming is not None and before is not None:
            coming.wait()
            home += before
        d_k, d_v = home.to(q.dtype).unbind(0)
        return d_q.to(q.dtype), d_k, d_v, None, None, None


def merge(out: Tensor, total: Tensor, piece_out: Tensor, piece_total: Tensor) -> None:
    """Add the softmax over some more keys to that over others, in place.

    Args:
        out: [b, a, n, d].
        total: [b, a, n], the log-sum-exp of the scores so far; -inf where nothing was seen.
    """
    share = torch.sigmoid(piece_total - total)  # of the new keys' weights
    share = share.masked_fill(piece_total.isneginf(), 0.0).unsqueeze(-1)  # also where nothing was seen before
    out.lerp_(piece_out.to(out.dtype), share.to(out.dtype))
    torch.logaddexp(total, piece_total.to(total.dtype), out=total)


def _lengths(sight: CausalBlocks) -> list[int]:
    return [count(chunks) for chunks in sight.keys]


def _resized(block: Tensor, length: int) -> Tensor:
    """Room for the block of another place, which may be longer or shorter."""
    return block.new_empty(*block.shape[:3], length, block.shape[4])
