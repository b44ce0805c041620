"""RAdam: Adam that rectifies the variance of its adaptive learning rate (Liu et al. 2020)."""

from __future__ import annotations

import math

from torch import Tensor

from shoal.engine.optim.from_torch import FromTorch
from shoal.engine.optim.rule import Rule, split_blocks
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig

_TRACTABLE = 5  # rho above which the variance is tractable, as in the authors' code and torch; the paper has 4


class RAdam(FromTorch):
    """RAdam's algorithm 2, with decoupled weight decay.

    While the variance of the adaptive rate is intractable (the first few steps), the update is momentum only.
    Afterwards the rate is rectified by the estimated variance, and the update is AdamW's with another rate, epsilon
    and decay.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards, "adamw")
        self.skips_on_device = False  # in the first updates
        self.decays = [group["weight_decay"] for group in self.rule.param_groups]

    def _lengths(self) -> tuple[float, float]:
        """Return rho infinity and rho of this update."""
        beta2, t = self.config.betas[1], self.count
        longest = 2 / (1 - beta2) - 1
        return longest, longest - 2 * t * beta2**t / (1 - beta2**t)

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        if self._lengths()[1] <= _TRACTABLE:
            Rule.apply(self, learning_rate, scale, skip)
        else:
            super().apply(learning_rate, scale, skip)

    def update(self, learning_rate: float) -> None:
        beta2, t = self.config.betas[1], self.count
        longest, length = self._lengths()
        if length <= _TRACTABLE:
            self._momentum(learning_rate)
            return
        rectified = math.sqrt(
            (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        )
        for group, decay in zip(self.rule.param_groups, self.decays, strict=True):
            group["eps"] = self.config.eps / math.sqrt(1 - beta2**t)  # added to the biased root
            group["weight_decay"] = decay / rectified  # decay is not rectified
        super().update(learning_rate * rectified)

    def _momentum(self, learning_rate: float) -> None:
        beta1, beta2 = self.config.betas
        for shard, parameter in zip(self.shards.shards, self.parameters, strict=True):
            state = self.rule.state[parameter]
            state["step"] += 1
            rate = learning_rate * shard.rate
            moments = (state[name] for name in self.made.states)
            for weights, gradient, mean, square in split_blocks(shard.weights, shard.gradient, *moments):
                mean.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                weights.mul_(1 - rate * shard.decay).sub_(mean, alpha=rate / (1 - beta1**self.count))
