"""SAGE: learning rates guided by sensitivity (Liang et al. 2022, "No Parameters Left Behind")."""

from __future__ import annotations

from torch import Tensor

from shoal.optim.rule import Elementwise


class Sage(Elementwise):
    """Adam whose rate of each weight is scaled by how much its sensitivity varies, relative to the sensitivity.

    Sensitivity ``I = |weight x gradient|`` estimates what the loss would change without the weight (equation 3). With
    its running mean ``M`` and its local variation ``U = |I - M|`` the rate is multiplied by ``(U + eps) / (M + eps)``
    (equations 4 to 6; algorithm 2, with Adam): weights that hardly matter are trained faster, settled ones slower.
    """

    STATES = ("exp_avg", "exp_avg_sq", "sensitivity")

    def block(self, weights: Tensor, gradient: Tensor, *states: Tensor, rate: float, decay: float) -> None:
        mean, square, sensitivity = states
        beta1, beta2 = self.config.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        now = (gradient * weights).abs_()
        sensitivity.lerp_(now, 1 - self.config.sensitivity_beta)
        now.sub_(sensitivity).abs_().add_(self.config.eps).mul_(mean)
        # One division by both: (root + eps c) (M + eps) / c, with c the bias of the root.
        bias = (1 - beta2**self.count) ** 0.5
        under = square.sqrt().add_(self.config.eps * bias)
        under.mul_(sensitivity + self.config.eps)
        if decay:
            weights.mul_(1 - rate * decay)
        weights.addcdiv_(now, under, value=-rate * bias / (1 - beta1**self.count))
