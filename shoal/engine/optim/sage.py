"""SAGE: learning rates guided by sensitivity (Liang et al. 2022, "No Parameters Left Behind")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.engine.optim.rule import Elementwise


class Sage(Elementwise):
    """Adam with a per-weight learning rate, scaled by the relative variation of the weight's sensitivity.

    Sensitivity ``I = |weight x gradient|`` estimates the change of the loss if the weight were removed (equation 3).
    With its running mean ``M`` and local variation ``U = |I - M|``, the rate is multiplied by ``(U + eps) / (M +
    eps)`` (equations 4 to 6; algorithm 2, with Adam): insensitive weights are trained faster, converged ones slower.
    """

    STATES = ("exp_avg", "exp_avg_sq", "sensitivity")

    def numbers(self, rate: float, decay: float) -> tuple[float, ...]:
        beta1, beta2 = self.config.betas
        bias = (1 - beta2**self.count) ** 0.5  # bias correction of the root
        return 1 - rate * decay, self.config.eps * bias, rate * bias / (1 - beta1**self.count)

    def block(
        self, weights: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[float | Tensor]
    ) -> None:
        mean, square, sensitivity = states
        kept, eps, step = numbers
        beta1, beta2 = self.config.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        now = (gradient * weights).abs_()
        sensitivity.lerp_(now, 1 - self.config.sensitivity_beta)
        now.sub_(sensitivity).abs_().add_(self.config.eps).mul_(mean)
        # One division by both: (root + eps) (M + eps), with the root and its eps multiplied by the root's bias.
        under = square.sqrt().add_(eps).mul_(sensitivity + self.config.eps)
        weights.mul_(kept).sub_(now.div_(under).mul_(step))
