"""The loss of a language model, in the memory of its logits: there is nothing larger in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE = -100
"""A target that does not count in the loss, by F.cross_entropy's own convention."""


class CrossEntropy(nn.Module):
    """Sum of the negative log-likelihoods [nats] of the targets that count, in float32 at least.

    It is written over the logits, of which torch's own would keep one more copy and make two in backward. The
    compiler makes torch's one kernel, so that one stays with it.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: [b, s, v], overwritten where they are float32 or wider; targets: [b, s] ids, or `IGNORE`."""
        if torch.compiler.is_compiling():
            logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return SummedCrossEntropy.apply(logits, targets, targets != IGNORE, logits.shape[-1], None)


class SummedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits, whole or split by token id: then with one collective of 2 numbers a token.

    Each rank's log-sum-exp and target logit are gathered and combined (the online softmax of Milakov & Gimelshein
    2018); the gradient, softmax minus one-hot, is local.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, counts: Tensor, here: int, gather: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """The summed loss [nats].

        Args:
            logits: [b, s, n] of n ids in a row, overwritten; those past ``here`` are padding.
            targets: [b, s] ids relative to the first of these.
            counts: [b, s] bool, targets that count.
            gather: stacks every rank's tensor, in order: [2, b, s] -> [ranks, 2, b, s]; None where all ids are here.
        """
        ctx.dtype, logits = logits.dtype, logits.detach()
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        # Finite, since a rank may hold nothing but padding.
        logits[..., here:] = torch.finfo(logits.dtype).min
        mine = counts if gather is None else (targets >= 0) & (targets < here) & counts
        target = targets.masked_fill(~mine, 0).unsqueeze(-1)  # [b, s, 1]
        at_target = logits.gather(-1, target).squeeze(-1).masked_fill(~mine, 0)
        most = logits.amax(-1)
        softmax = torch.softmax(logits, -1, out=logits)  # [b, s, n], among these ids
        total = own = most - softmax.amax(-1).log()  # [b, s], their log-sum-exp
        if gather is not None:
            owns, at_targets = gather(torch.stack((own, at_target))).unbind(1)  # each [ranks, b, s]
            total, at_target = owns.logsumexp(0), at_targets.sum(0)
        ctx.save_for_backward(softmax, (own - total).exp().mul_(counts), target, mine)
        return (total - at_target).masked_fill(~counts, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        """In place as well: a second backward of the same loss is refused by autograd, which sees the change."""
        softmax, share, target, mine = ctx.saved_tensors
        d_logits = softmax.mul_((share * gradient).unsqueeze(-1))
        d_logits.scatter_add_(-1, target, -(mine * gradient).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None, None, None
