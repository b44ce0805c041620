"""Learning-rate schedules."""

from __future__ import annotations

import math

from shoal.spec.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step, from 0, of a run of ``steps`` steps.

    Linear warm-up, then by ``config.schedule``: "cosine" (Loshchilov & Hutter 2017, equation 5) or "linear" down to
    ``minimum``; "wsd" stays at the peak and decays linearly over the last ``decay_fraction`` (Hu et al. 2024, section
    4); "inverse-sqrt" decays as 1 / sqrt(step), independent of the run's length, but not below ``minimum`` (Vaswani et
    al. 2017, equation 3); "constant".
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left = max(1, steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / left)
    if config.schedule == "constant":
        part = 1.0
    elif config.schedule == "inverse-sqrt":
        warm = max(1, config.warmup_steps)
        return config.learning_rate * max(config.min_lr_fraction, math.sqrt(warm / (warm + step - config.warmup_steps)))
    elif config.schedule == "linear":
        part = 1 - done
    elif config.schedule == "cosine":
        part = (1 + math.cos(math.pi * done)) / 2
    else:
        part = min(1.0, (1 - done) / config.decay_fraction) if config.decay_fraction else 1.0
    return config.learning_rate * (config.min_lr_fraction + (1 - config.min_lr_fraction) * part)
