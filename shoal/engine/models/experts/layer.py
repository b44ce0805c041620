"""Mixture-of-experts layer that replaces a feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.router import Router, RoutingContext
from shoal.engine.models.feedforward import MLP, SwiGLU
from shoal.spec.catalog import ModelShape


class MoE(nn.Module):
    """Weighted sum of the routed experts' outputs, plus the output of the shared experts (one block of their width)."""

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        assert shape.experts is not None
        self.router = Router(shape, layer)
        self.experts = GroupedExperts(shape)
        width = shape.experts.shared * shape.experts.ffn
        block = SwiGLU if shape.family == "llama" else MLP
        self.shared = block(shape, width) if width else None

    def forward(self, x: Tensor, context: RoutingContext) -> Tensor:
        """Apply the layer to x: [b, s, h]."""
        places = self.router.places
        y = places.join(self.routed(places.take(x), context))
        return y if self.shared is None else y + self.shared(x)

    def routed(self, x: Tensor, context: RoutingContext) -> Tensor:
        """Return the weighted sum of the routed experts' outputs."""
        weights, chosen = self.router(x, context)  # [b, s, E]
        rows = x.flatten(0, 1)  # [n, h]
        expert, token = chosen.flatten(0, 1).t().nonzero(as_tuple=True)  # [m], sorted by expert, then by token
        y = self.experts(_CopyTokens.apply(rows, token), chosen.sum((0, 1)))  # [m, h]
        weight = weights.flatten().index_select(0, token * weights.shape[-1] + expert).to(y.dtype)
        return _WeightedSum.apply(y, weight, token, len(rows)).view_as(x)


def _sum_by_token(rows: Tensor, token: Tensor, n: int) -> Tensor:
    """Sum the rows of each of n tokens in a fixed order: [m, h] and the token of each row -> [n, h]."""
    if rows.device.type == "cpu":
        return rows.new_zeros(n, rows.shape[1]).index_add_(0, token, rows)
    # On other devices `index_add_` adds in any order, which changes sums of three terms; this sorts first.
    return torch.ops.aten.embedding_dense_backward(rows, token, n, -1, False)


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
