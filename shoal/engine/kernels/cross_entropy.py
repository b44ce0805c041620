"""Softmax statistics of logits, and the gradient of the cross-entropy in their place.

Forward reads the logits once and keeps two numbers a token (online softmax, Milakov & Gimelshein 2018); backward reads
them again and overwrites them. No copy of the logits in float32 exists. The two passes are separate operators because
ranks that split the vocabulary exchange the numbers in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example


@custom_op("shoal::softmax_statistics", mutates_args=())
def softmax_statistics(logits: Tensor, target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row, and its logit at the target.

    Args:
        logits: [.., n], of which the first ``columns`` count; all others are padding.
        target: [..] int64 column, or -1 for none, whose logit is 0.

    Returns:
        [..] each, in at least float32.
    """
    exact = logits[..., :columns].to(torch.promote_types(logits.dtype, torch.float32))
    if not columns:
        return exact.new_full(target.shape, torch.finfo(exact.dtype).min), exact.new_zeros(target.shape)
    at_target = exact.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return exact.logsumexp(-1), at_target.masked_fill(target < 0, 0)


softmax_statistics.register_kernel("cuda", launch("cross_entropy", "statistics"))


@softmax_statistics.register_fake
def _(logits: Tensor, target: Tensor, columns: int):
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(target.shape, dtype=exact), logits.new_empty(target.shape, dtype=exact)


@custom_op("shoal::overwrite_with_gradient", mutates_args=("logits",))
def overwrite_with_gradient(logits: Tensor, target: Tensor, total: Tensor, scale: Tensor, columns: int) -> None:
    """Overwrite logits with scale (softmax - one-hot target), and padding with zeros.

    Args:
        logits, target, columns: see `softmax_statistics`; logits are contiguous.
        total: [..] log-sum-exp over all columns of all ranks.
        scale: [..] gradient of each row's loss, 0 for rows that do not count.
    """
    exact = logits[..., :columns].to(total.dtype)
    gradient = (exact - total.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1))
    if columns:
        of_target = scale.masked_fill(target < 0, 0).neg().unsqueeze(-1)
        gradient.scatter_add_(-1, target.clamp(min=0).unsqueeze(-1), of_target)
    logits[..., :columns] = gradient
    logits[..., columns:] = 0


overwrite_with_gradient.register_kernel("cuda", launch("cross_entropy", "gradient"))


def _statistics_and_gradient(logits: Tensor, target: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, ...]:
    logits = logits.clone()
    total, at_target = softmax_statistics(logits, target, columns)
    overwrite_with_gradient(logits, target, total, scale.to(total.dtype), columns)
    return total, at_target, logits


def _statistics_and_gradient_reference(
    logits: Tensor, target: Tensor, scale: Tensor, columns: int
) -> tuple[Tensor, ...]:
    exact, hit = logits[..., :columns], target >= 0
    one_hot = F.one_hot(target.clamp(min=0), columns) * hit.unsqueeze(-1)
    gradient = (exact.softmax(-1) - one_hot) * scale.unsqueeze(-1)
    return exact.logsumexp(-1), (exact * one_hot).sum(-1), F.pad(gradient, (0, logits.shape[-1] - columns))


def examples() -> Iterator[Example]:
    """Yield a row of an odd length, and one of several blocks with padding; some rows have no target."""
    for n, columns in ((7, 7), (9001, 8999)):
        target = torch.randint(-1, columns, (2, 3))
        yield Example(
            f"cross_entropy, n = {n}", partial(_statistics_and_gradient, columns=columns),
            partial(_statistics_and_gradient_reference, columns=columns),
            (4 * torch.randn(2, 3, n), target, torch.rand(2, 3)), gradients=(),
        )
