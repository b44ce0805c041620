"""Construction of update rules by name, and a table of their states."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from shoal.engine.optim.adafactor import Adafactor
from shoal.engine.optim.adam8bit import Adam8bit
from shoal.engine.optim.from_torch import TORCH, FromTorch
from shoal.engine.optim.low_precision_state import Float32Rule, FusedAdam
from shoal.engine.optim.muon import Muon
from shoal.engine.optim.radam import RAdam
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.sage import Sage
from shoal.engine.optim.shards import Shards
from shoal.engine.optim.sophia import Sophia
from shoal.engine.precision.policy import Policy
from shoal.spec.config import OptimizerConfig
from shoal.spec.optimizers import ELEMENTWISE, is_matrix

RULES: dict[str, Callable[[OptimizerConfig, Shards], Rule]] = {
    **{name: partial(FromTorch, name=name) for name in TORCH},
    "adafactor": Adafactor,
    "adam8bit": Adam8bit,
    "muon": Muon,
    "radam": RAdam,
    "sage": Sage,
    "sophia-g": Sophia,
    "sophia-h": Sophia,
}


def build(config: OptimizerConfig, shards: Shards, *, compile: bool = False) -> Rule:
    """Build the update rule of a run, with its states allocated. ``compile`` does nothing for torch's own kernels."""
    rule = RULES[config.name](config, shards)
    if compile:
        rule.compile()
    return rule


COMPILED = ("adafactor", "sage", "sophia-g", "sophia-h")
"""Rules that have something to compile; the others call kernels of torch that are fused already."""


def build_for(
    policy: Policy, config: OptimizerConfig, shards: Shards, seed: int, *, compile: bool = False
) -> Rule:
    """Build the rule for weights, gradients and states in a policy's formats; ``seed`` is of stochastic rounding."""
    make = partial(build, compile=compile)
    if policy.formats.widened and config.name in ELEMENTWISE:  # other rules accept narrow gradients
        if FusedAdam.suits(config.name, shards, policy.state):
            return FusedAdam(config, shards, decoupled=config.name == "adamw", state=policy.state, seed=seed)
        return Float32Rule(config, shards, make, state=policy.state, seed=seed)
    if policy.formats.narrow:
        return Adam8bit(config, shards, seed)
    return make(config, shards)


def weight_decay(config: OptimizerConfig, name: str, shape: tuple[int, ...]) -> float:
    """Return the weight decay of a parameter of this shape: on matrices only, not on norms and biases."""
    return config.weight_decay if is_matrix(name, shape) else 0.0


def rate_factor(config: OptimizerConfig, name: str) -> float:
    """Return the factor on a parameter's learning rate: the first match of its name in ``config.lr_factors``."""
    return next((factor for pattern, factor in config.lr_factors.items() if fnmatchcase(name, pattern)), 1.0)
