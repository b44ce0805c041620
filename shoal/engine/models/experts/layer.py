"""Mixture-of-experts layer that replaces a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.permutation import permute
from shoal.engine.models.experts.router import Router, RoutingContext
from shoal.engine.models.feedforward import MLP, SwiGLU
from shoal.spec.catalog import ModelShape


class MoE(nn.Module):
    """Weighted sum of the routed experts' outputs, plus the output of the shared experts (one block of their width).

    Attributes:
        down_bias: [E, h] biases of the experts' outputs or None. Each token adds its experts' biases, weighted, where
            it is routed: ranks that split an expert, or hold others, need none of them.
    """

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        assert shape.experts is not None
        biases = shape.experts.biases
        self.down_bias = nn.Parameter(torch.empty(shape.experts.count, shape.hidden)) if biases else None
        self.router = Router(shape, layer)
        self.experts = GroupedExperts(shape)
        width = shape.experts.shared * shape.experts.ffn
        block = SwiGLU if shape.family == "llama" else MLP
        self.shared = block(shape, width) if width else None

    def forward(self, x: Tensor, context: RoutingContext) -> Tensor:
        """Apply the layer to x: [b, s, h]."""
        places = self.router.places
        finish = self.start(places.take(x), context)
        if self.shared is None:
            return places.join(finish())
        if self.experts.overlaps:  # rows travel during the shared experts' forward, and gradients during their backward
            shared = self.shared(x)
            return places.join(finish()) + shared
        return places.join(finish()) + self.shared(x)

    def start(self, x: Tensor, context: RoutingContext) -> Callable[[], Tensor]:
        """Route tokens, [b, s, h], and start to send them to their experts.

        Returns:
            A function that computes the weighted sum of the experts' outputs.
        """
        weights, chosen = self.router(x, context)  # [b, s, E]
        permutation = permute(chosen.flatten(0, 1), x, self.router.most_choices(x))
        experts = self.experts.announce(permutation.ends)
        rows = x
        if self.router.experts.scales_input:  # of which a token has one
            rows, weights = x * weights.sum(-1, keepdim=True).to(x.dtype), chosen.to(weights.dtype)
        finish = experts(permutation.copy(rows.flatten(0, 1)))
        if self.down_bias is None:
            return lambda: permutation.combine(finish(), weights.flatten(0, 1)).view_as(x)
        biases = weights.to(x.dtype) @ self.down_bias  # [b, s, h]
        return lambda: permutation.combine(finish(), weights.flatten(0, 1)).view_as(x) + biases
