"""RAdam: Adam that rectifies the variance of its adaptive learning rate (Liu et al. 2020)."""

from __future__ import annotations

import math

from shoal.engine.optim.from_torch import FromTorch
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig

_TRACTABLE = 5  # rho above which the variance is tractable, as in the authors' code and torch; the paper has 4
_HIDING = 2.0**50  # an epsilon beside which every root of a second moment rounds to 0


class RAdam(FromTorch):
    """RAdam's algorithm 2, with decoupled weight decay: AdamW's update with another rate, epsilon and decay.

    While the variance of the adaptive rate is intractable (the first few steps), the update is momentum only.
    Afterwards the rate is rectified by the estimated variance.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards, "adamw")
        self.decays = [group["weight_decay"] for group in self.rule.param_groups]

    def update(self, learning_rate: float) -> None:
        beta2, t = self.config.betas[1], self.count
        longest = 2 / (1 - beta2) - 1  # rho infinity
        length = longest - 2 * t * beta2**t / (1 - beta2**t)  # rho of this update
        if length <= _TRACTABLE:
            factor = eps = _HIDING
        else:
            factor = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            eps = self.config.eps / math.sqrt(1 - beta2**t)  # added to the biased root
        for group, decay in zip(self.rule.param_groups, self.decays, strict=True):
            group["eps"], group["weight_decay"] = eps, decay / factor  # decay is not rectified
        super().update(learning_rate * factor)
