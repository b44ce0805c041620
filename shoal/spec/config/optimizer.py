"""Configuration of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section

OptimizerName = Literal[
    "adamw", "adam", "sgd", "momentum", "adagrad", "radam", "adafactor", "adam8bit", "muon", "sage", "sophia-g",
    "sophia-h",
]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The update rule and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """The update rule; see the table in docs/numerics.md."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """adam, adamw, radam, adam8bit, sage, and muon's AdamW: decay rates of the first and second moment. sophia: decay
    rates of the gradient and of the Hessian diagonal."""

    eps: PositiveFloat = 1e-8
    """The same rules and adagrad: added to the square root of the second moment. sophia: lower bound of hessian_scale
    times the Hessian diagonal."""

    momentum: Decay = 0.95
    """momentum and muon: decay rate of the gradient sum."""

    nesterov: bool = False
    """momentum: use Nesterov momentum (Sutskever et al. 2013), as muon always does."""

    sensitivity_beta: Decay = 0.85
    """sage: decay rate of the running mean of sensitivities."""

    hessian_every: PositiveInt = 10
    """sophia: steps between estimates of the Hessian diagonal (k)."""

    hessian_scale: PositiveFloat = 0.05
    """sophia: factor on the Hessian diagonal (gamma; the authors use 0.05 for sophia-g and 0.01 for sophia-h). The
    smaller it is, the more elements take a step of the full learning rate."""

    lr_factors: dict[str, PositiveFloat] = Field(default={})
    """Factors on the learning rate by parameter-name pattern, such as {"embed.*" = 0.5}; the first match applies."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices (not of norms and biases), decoupled and multiplied by the learning rate (Loshchilov &
    Hutter 2019). For adam, adagrad and momentum it is added to the gradient."""

    clip_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""

    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine or linear to the minimum; wsd (warm-up, stable, linear decay: Hu et al.
    2024); inverse-sqrt, 1 / sqrt(step) but at least the minimum (Vaswani et al. 2017); or constant."""

    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""

    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    """wsd: fraction of the steps after the warm-up in which the rate decays, at the end."""

    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
