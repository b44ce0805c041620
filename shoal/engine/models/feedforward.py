"""Dense feed-forward blocks of both model families."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.projections import project
from shoal.spec.catalog import ModelShape


class SwiGLU(nn.Module):
    """Gated feed-forward block: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate, self.up)  # [b, s, width]
        return self.down(F.silu(gate) * up)


class MLP(nn.Module):
    """Feed-forward block of GPT-2: down(gelu(up x))."""

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.up = nn.Linear(shape.hidden, width)
        self.down = nn.Linear(width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
