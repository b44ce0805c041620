"""Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context").

Each ring position keeps its queries, and keys and values circulate: while a position computes with one block, the next
is in transit. The partial softmax is merged with each block (`kernels`). Backward circulates keys and values once more.
The gradients of each block follow one step later: a position adds its contribution and forwards them, and the last one
returns them to the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine import kernels
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, start_shift
from shoal.engine.kernels.merge_attention import merge_attention_, merge_attention_reference
from shoal.engine.models.attention_kernels import Kernel
from shoal.engine.models.block_attention import attend, attend_backward, sinks_gradient
from shoal.engine.parallel.context.causal_blocks import CausalBlocks


@dataclass(frozen=True)
class RingPosition:
    """This rank's position in the ring.

    Attributes:
        blocks: group for keys and values; None with one position.
        gradients: group for their gradients, separate so that they do not wait for the blocks.
    """

    index: int
    size: int
    ranks: Sequence[int]
    blocks: Group | None
    gradients: Group | None

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> RingPosition:
        """Return the ring position of a mesh. Collective: all ranks must call it at the same point."""
        return cls(
            mesh.index("ring"), mesh.size("ring"), mesh.ranks("ring"),
            mesh.group("ring", purpose="blocks"), mesh.group("ring", purpose="block gradients"),
        )

    def shift(self, x: Tensor, out: Tensor, group: Group | None) -> Pending:
        """Start sending to the next position and receiving from the previous one."""
        assert group is not None
        return start_shift(x, self.ranks[(self.index + 1) % self.size], out, self.ranks[self.index - 1], group)

    def circulate(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the block of every position, this one's first; the next is in transit while one is used.

        Args:
            held: [2, b, k, t, d], this position's keys and values.
            lengths: t of every position.

        Yields:
            (position, block).
        """
        for step in range(self.size):
            source, coming = (self.index - step) % self.size, None
            if step + 1 < self.size:
                following = _resized(held, lengths[source - 1])
                coming = self.shift(held, following, self.blocks)
            yield source, held
            if coming is not None:
                coming.wait()
                held = following


class RingAttention(torch.autograd.Function):
    """Attention of this position's queries to the keys of all positions."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, ring: RingPosition, scores: CausalBlocks, kernel: Kernel,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax(q k^T / sqrt(d)) v.

        Args:
            q: [b, a, n, d], this position's queries, in the order of ``scores.queries``.
            k, v: [b, k, t, d], its keys and values, in the order of its ``scores.keys``.
            sinks: [a], one more score in each row of a head, without a value.

        Returns:
            [b, a, n, d].
        """
        q, held = _packed(q), torch.stack((k, v))
        exact = torch.promote_types(q.dtype, torch.float32)
        b, a, n, d = q.shape
        # Heads inside tokens, as the next layer reads it, which saves a copy.
        out = torch.zeros(b, n, a, d, dtype=exact, device=q.device).transpose(1, 2)
        total = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)
        if sinks is not None:
            total.copy_(sinks.view(-1, 1))
        for position, (keys, values) in ring.circulate(held, scores.key_lengths):
            for block in scores.blocks(position):
                merge(
                    out[:, :, block.rows], total[:, :, block.rows],
                    *attend(
                        q[:, :, block.rows], keys[:, :, block.columns], values[:, :, block.columns],
                        scores.mask(block, position), causal=block.causal, window=block.window,
                        kernel=kernel, softcap=softcap,
                    ),
                )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, held, out, total, sinks)
        ctx.ring, ctx.scores, ctx.kernel, ctx.softcap = ring, scores, kernel, softcap
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, held, out, total, sinks = ctx.saved_tensors
        ring, scores, kernel = ctx.ring, ctx.scores, ctx.kernel
        gradient = _packed(gradient)
        d_q, home = torch.zeros_like(q, dtype=total.dtype), torch.zeros_like(held, dtype=total.dtype)
        lengths, coming, before = scores.key_lengths, None, None
        for position, (keys, values) in ring.circulate(held, lengths):
            d_held = home if position == ring.index else home.new_zeros(2, *keys.shape)
            for block in scores.blocks(position):
                rows, columns = block.rows, block.columns
                found = attend_backward(
                    gradient[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns],
                    out[:, :, rows], total[:, :, rows],
                    scores.mask(block, position), causal=block.causal, window=block.window,
                    kernel=kernel, softcap=ctx.softcap,
                )
                for sums, part in zip((d_q[:, :, rows], *d_held[:, :, :, columns].unbind(0)), found, strict=True):
                    sums += part
                del found, part  # frees them before the next block
            if position == ring.index:
                continue
            if coming is not None and before is not None:  # received together
                coming.wait()
                d_held += before
            before = _resized(d_held, lengths[position - 1])
            coming = ring.shift(d_held, before, ring.gradients)
        if coming is not None and before is not None:
            coming.wait()
            home += before
        d_k, d_v = home.to(q.dtype).unbind(0)
        d_sinks = None if sinks is None else sinks_gradient(gradient, out, total, sinks)
        return d_q.to(q.dtype), d_k, d_v, None, None, None, None, d_sinks


def merge(out: Tensor, total: Tensor, block_out: Tensor, block_total: Tensor) -> None:
    """Merge the softmax over additional keys into an accumulated one, in place; arguments of `merge_attention_`."""
    fused = kernels.use_fused(out)
    (merge_attention_ if fused else merge_attention_reference)(out, total, block_out, block_total)


def _resized(block: Tensor, length: int) -> Tensor:
    """Return a buffer for a block of another length."""
    return block.new_empty(*block.shape[:3], length, block.shape[4])


def _packed(x: Tensor) -> Tensor:
    """Return x [b, a, s, d] as the device's kernel reads it without copies: heads inside tokens on CUDA."""
    return x if x.is_cuda else x.contiguous()
