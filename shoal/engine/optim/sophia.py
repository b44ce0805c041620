"""Sophia: momentum divided by the Hessian diagonal, clipped per element (Liu et al. 2023, arXiv 2305.14342)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.engine.optim.rule import Elementwise


class Sophia(Elementwise):
    """Sophia's algorithm 3. `shoal.training.step.curvature` estimates the diagonal, since it needs the model.

    A weight moves by at most the learning rate, and by exactly that where its curvature is small or negative;
    elsewhere it takes a Newton step along the mean gradient.
    """

    STATES = ("exp_avg", "hessian")
    estimated = False  # whether the estimate for the next update has been received

    @property
    def due(self) -> bool:
        """Whether the next update needs a new estimate: the first of every k (line 7)."""
        return self.count % self.config.hessian_every == 0 and not self.estimated

    def learn(self, estimates: Sequence[Tensor]) -> None:
        """Update the Hessian diagonal with a new estimate: one tensor per shard, with its layout (line 9)."""
        self.wait_for_reads()
        for hessian, estimate in zip(self.tensors["hessian"], estimates, strict=True):
            hessian.lerp_(estimate, 1 - self.config.betas[1])
        self.estimated = True

    def step(self, learning_rate: float, scale: Tensor | float = 1.0, skip: Tensor | None = None) -> None:
        """Apply one update: see `Rule.step`.

        Raises:
            RuntimeError: a required estimate is missing.
        """
        if self.due:
            raise RuntimeError(f"update {self.count} of Sophia has no new estimate of the Hessian")
        super().step(learning_rate, scale, skip)
        self.estimated = False

    def numbers(self, rate: float, decay: float) -> tuple[float, ...]:
        return 1 - rate * decay, rate / self.config.hessian_scale

    def block(
        self, weights: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[float | Tensor]
    ) -> None:
        mean, hessian = states
        kept, step = numbers
        mean.lerp_(gradient, 1 - self.config.betas[0])  # line 6
        # Lines 12 and 13, scaled by 1 / gamma: clip(m / max(h, eps / gamma), gamma) / gamma
        gamma = self.config.hessian_scale
        newton = hessian.clamp(min=self.config.eps / gamma)
        torch.div(mean, newton, out=newton).clamp_(-gamma, gamma)
        weights.mul_(kept).sub_(newton.mul_(step))
