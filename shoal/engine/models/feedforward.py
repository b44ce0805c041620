"""Dense feed-forward blocks of both model families, and several linear layers of one input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine import kernels
from shoal.engine.kernels.swiglu import swiglu, swiglu_pair
from shoal.spec.catalog import ModelShape


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several linear layers to one input: [.., in] -> [.., out] of each.

    Replacements of torch's layers may combine the products (`shoal.engine.parallel.linear`).
    """
    together = getattr(linears[0], "together", None)
    return tuple(linear(x) for linear in linears) if together is None else together(x, linears)


def project_joined(x: Tensor, *linears: nn.Linear) -> Tensor | None:
    """Apply several linear layers to one input as one product for a fused operator: [.., in] -> [.., sum of out].

    None if operators are not fused, or if the weights are not one matrix in memory.
    """
    joined = getattr(linears[0], "joined", None) if _use_fused(x) else None
    return None if joined is None else joined(x, linears)


def _use_fused(x: Any) -> bool:
    return kernels.use_fused(x) if isinstance(x, Tensor) else True  # an input that is already encoded


ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class ClampedSwiGLU(torch.autograd.Function):
    """gate x sigmoid(1.702 gate) x (up + 1) of a gate up to 7 and an up between -7 and 7 (gpt-oss: OpenAI 2025).

    Backward computes the activation again.
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gate, up = ctx.saved_tensors
        limited = gate.clamp(max=LIMIT)
        s = torch.sigmoid(ALPHA * limited)
        d_up = gradient * limited * s * (up.abs() <= LIMIT)
        slope = s * (1 + ALPHA * limited * (1 - s)) * (gate <= LIMIT)
        return gradient * (up.clamp(-LIMIT, LIMIT) + 1) * slope, d_up


class SwiGLU(nn.Module):
    """Gated feed-forward block: down(silu(gate x) * up x), or with GELU of the gate (Shazeer 2020), or clamped."""

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.activation = shape.activation
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def first_layers(self) -> tuple[nn.Linear, ...]:
        """Return the layers that take the input."""
        return self.gate, self.up

    def forward(self, x: Tensor) -> Tensor:
        activate = getattr(self.gate, "activate", None) if _use_fused(x) and self.activation is None else None
        y = activate(x, (self.gate, self.up), self.down) if activate is not None else None
        if y is not None:  # [b, s, width], perhaps encoded
            return self.down(y)
        if self.activation is not None:
            gate, up = project(x, self.gate, self.up)
            clamped = self.activation == "clamped"
            return self.down(ClampedSwiGLU.apply(gate, up) if clamped else F.gelu(gate, approximate="tanh") * up)
        if (gate_up := project_joined(x, self.gate, self.up)) is not None:  # [b, s, 2 width]
            return self.down(swiglu(gate_up))
        gate, up = project(x, self.gate, self.up)  # [b, s, width]
        return self.down(swiglu_pair(gate, up) if kernels.use_fused(x) else F.silu(gate) * up)


class MLP(nn.Module):
    """Feed-forward block of GPT-2: down(gelu(up x))."""

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.up = nn.Linear(shape.hidden, width)
        self.down = nn.Linear(width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
