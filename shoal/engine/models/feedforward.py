"""Dense feed-forward blocks of both model families, and several linear layers of one input."""

from __future__ import annotations

from typing import Any

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


class SwiGLU(nn.Module):
    """Gated feed-forward block: down(silu(gate x) * up x), or with GELU of the gate (Shazeer 2020)."""

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.gelu = shape.activation == "gelu"
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def first_layers(self) -> tuple[nn.Linear, ...]:
        """Return the layers that take the input."""
        return self.gate, self.up

    def forward(self, x: Tensor) -> Tensor:
        activate = getattr(self.gate, "activate", None) if _use_fused(x) and not self.gelu else None
        y = activate(x, (self.gate, self.up), self.down) if activate is not None else None
        if y is not None:  # [b, s, width], perhaps encoded
            return self.down(y)
        if self.gelu:
            gate, up = project(x, self.gate, self.up)
            return self.down(F.gelu(gate, approximate="tanh") * up)
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
