"""Language model loss computed in the memory of the logits, the largest tensor of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.engine import kernels
from shoal.engine.kernels.cross_entropy import overwrite_with_gradient, softmax_statistics

IGNORE = -100
"""Target that does not count in the loss, as in F.cross_entropy."""


class CrossEntropy(nn.Module):
    """Sum of the negative log-likelihoods [nats] of the counted targets, in at least float32.

    It overwrites the logits; torch's own loss keeps another copy and makes two in backward. Under the compiler on the
    CPU, torch's loss is used, because it compiles to one kernel.

    Attributes:
        columns: number of logits that are ids; the others are padding. None if all are.
        rows: [b] loss of each sequence [nats] in the last forward, detached, if kept.
    """

    columns: int | None = None
    keep_rows = False
    rows: Tensor | None = None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; overwrites logits of >= 32 bits. logits: [b, s, v]; targets: [b, s] ids or `IGNORE`."""
        if torch.compiler.is_compiling():  # on the CPU: `shoal.engine.parallel.apply` compiles no loss on CUDA
            logits = logits[..., : self.columns]
            logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            if not self.keep_rows:
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
            each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
            self.rows = each.detach().view(targets.shape).sum(1)
            return each.sum()
        counts = targets != IGNORE
        columns = self.columns or logits.shape[-1]
        return SummedCrossEntropy.apply(logits, targets, counts, columns, None, self.rows_for(targets))

    def rows_for(self, targets: Tensor) -> Tensor | None:
        """Return the memory for the loss of each sequence, [b]; None if it is not kept."""
        self.rows = torch.empty(len(targets), dtype=torch.float64, device=targets.device) if self.keep_rows else None
        return self.rows


class SummedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits, unsplit or split by token id with one collective of 2 numbers per token.

    Each rank's log-sum-exp and target logit are gathered and combined (online softmax, Milakov & Gimelshein 2018). The
    gradient, softmax minus one-hot, is local. On the CPU forward overwrites the logits with the softmax, or a copy of
    logits in 16 bits; fused operators only read them, and backward overwrites them in their own format.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, counts: Tensor, columns: int, gather: Callable[[Tensor], Tensor] | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the summed loss [nats].

        Args:
            logits: [b, s, n] of n consecutive ids, overwritten; the first ``columns`` are ids, the others padding.
            targets: [b, s] ids relative to the first of these ids.
            counts: [b, s] bool, targets that count.
            gather: stacks a tensor of all ranks, in order: [2, b, s] -> [ranks, 2, b, s]; None if all ids are on this
                rank.
            rows: [b], set to the loss of each sequence.
        """
        ctx.dtype, logits = logits.dtype, logits.detach()
        ctx.columns = columns if kernels.use_fused(logits) else None
        mine = counts if gather is None else (targets >= 0) & (targets < columns) & counts
        if ctx.columns is not None:
            target = targets.masked_fill(~mine, -1)
            total, at_target = softmax_statistics(logits, target, columns)
        else:
            if logits.dtype in (torch.bfloat16, torch.float16):
                logits = logits.float()
            # Finite, because a rank may hold only padding.
            logits[..., columns:] = torch.finfo(logits.dtype).min
            target = targets.masked_fill(~mine, 0).unsqueeze(-1)  # [b, s, 1]
            at_target = logits.gather(-1, target).squeeze(-1).masked_fill(~mine, 0)
            most = logits.amax(-1)
            softmax = torch.softmax(logits, -1, out=logits)  # [b, s, n], over the local ids
            total = own = most - softmax.amax(-1).log()  # [b, s], log-sum-exp over the local ids
        if gather is not None:
            owns, at_targets = gather(torch.stack((total, at_target))).unbind(1)  # each [ranks, b, s]
            total, at_target = owns.logsumexp(0), at_targets.sum(0)
        if ctx.columns is not None:
            ctx.save_for_backward(logits, total, target, counts)
        else:
            ctx.save_for_backward(softmax, (own - total).exp().mul_(counts), target, mine)
        losses = (total - at_target).masked_fill(~counts, 0)
        if rows is not None:
            rows.copy_(losses.sum(1))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        """Compute the gradient in place; autograd detects the change and rejects a second backward."""
        if ctx.columns is not None:
            logits, total, target, counts = ctx.saved_tensors
            overwrite_with_gradient(logits, target, total, counts * gradient, ctx.columns)
            return logits, None, None, None, None, None
        softmax, share, target, mine = ctx.saved_tensors
        d_logits = softmax.mul_((share * gradient).unsqueeze(-1))
        d_logits.scatter_add_(-1, target, -(mine * gradient).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None, None, None, None
