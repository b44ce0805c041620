"""Rows of tokens sorted by expert, and the weighted sum of each token's results.

The host selects exactly the chosen rows. On a device that queues its work their number is unknown to the host, so there
the rows are as many as can be chosen, and the device knows where each expert's rows end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine import kernels
from shoal.engine.kernels.permute import combine_rows, copy_rows, sort_choices


class DevicePermutation:
    """Assignment of rows to the chosen pairs of token and expert, sorted by expert, then by token.

    Attributes:
        ends: [E] int32 end of each expert's rows.
    """

    def __init__(self, chosen: Tensor, m: int, k: int):
        self.token, self.expert, self.rows, self.ends = sort_choices(chosen, m, k)

    def copy(self, x: Tensor) -> Tensor:
        """Copy each token once per expert: [n, h] -> [m, h]."""
        return copy_rows(x, self.token, self.rows)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """Sum each token's rows with their weights: [m, h], [n, E] -> [n, h]."""
        return combine_rows(y, weights, self.token, self.expert, self.rows)


class HostPermutation:
    """`DevicePermutation` where the host knows the number of rows."""

    def __init__(self, chosen: Tensor):
        self.expert, self.token = chosen.t().nonzero(as_tuple=True)  # [m]
        self.n, self.ends = len(chosen), chosen.sum(0).cumsum(0, dtype=torch.int32)

    def copy(self, x: Tensor) -> Tensor:
        return _CopyTokens.apply(x, self.token)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        weight = weights.flatten().index_select(0, self.token * weights.shape[-1] + self.expert).to(y.dtype)
        return _WeightedSum.apply(y, weight, self.token, self.n)


def permute(chosen: Tensor, x: Tensor, most: tuple[int, int]) -> DevicePermutation | HostPermutation:
    """Sort the chosen pairs of [n, E], of which there are at most ``most`` (in total, per token), for tokens x."""
    on_device = x.is_cuda or kernels.use_fused(x)  # float64 too
    return DevicePermutation(chosen, *most) if on_device else HostPermutation(chosen)


def _sum_by_token(rows: Tensor, token: Tensor, n: int) -> Tensor:
    """Sum the rows of each of n tokens, on the CPU in a fixed order: [m, h] and the token of each row -> [n, h]."""
    return rows.new_zeros(n, rows.shape[1]).index_add_(0, token, rows)


class _CopyTokens(torch.autograd.Function):
    """Copy each token's row once per expert: [n, h] -> [m, h]."""

    @staticmethod
    def forward(ctx, rows: Tensor, token: Tensor) -> Tensor:
        ctx.n = len(rows)
        ctx.save_for_backward(token)
        return rows.index_select(0, token)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (token,) = ctx.saved_tensors
        return _sum_by_token(gradient, token, ctx.n), None


class _WeightedSum(torch.autograd.Function):
    """Weighted sum of each token's rows, [n, h]; saves the rows for backward, not the products."""

    @staticmethod
    def forward(ctx, y: Tensor, weight: Tensor, token: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(y, weight, token)
        return _sum_by_token(y * weight.unsqueeze(-1), token, n)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        y, weight, token = ctx.saved_tensors
        gradient = gradient.index_select(0, token)
        d_weight = torch.linalg.vecdot(gradient, y)
        return gradient.mul_(weight.unsqueeze(-1)), d_weight, None, None
