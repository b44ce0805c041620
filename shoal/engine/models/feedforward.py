"""The dense feed-forward blocks of both families."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.projections import JointProjections
from shoal.spec.catalog import ModelShape


class SwiGLU(JointProjections):
    """The gated feed-forward block: down(silu(gate x) * up x) (Shazeer 2020)."""

    projections = ("gate", "up")  # of one input, by `project`

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down(F.silu(gate) * up)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gate and value, each [.., width]."""
        return self.gate(x), self.up(x)


class MLP(JointProjections):
    """The feed-forward block of GPT-2: down(gelu(up x))."""

    projections = ("up",)

    def __init__(self, shape: ModelShape, width: int):
        super().__init__()
        self.up = nn.Linear(shape.hidden, width)
        self.down = nn.Linear(width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        (up,) = self.project(x)
        return self.down(F.gelu(up, approximate="tanh"))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """What enters the non-linearity, [.., width]."""
        return (self.up(x),)
