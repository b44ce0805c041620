"""The update rule of a run."""

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
    """The update rule; docs/numerics.md has a table of them."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """adam, adamw, radam, adam8bit, sage, and muon's AdamW: decay rates of the first and second moment; sophia: of the
    gradient and of the Hessian's diagonal."""

    eps: PositiveFloat = 1e-8
    """The same, and adagrad: added to the root of the second moment; sophia: least value of hessian_scale times the
    diagonal."""

    momentum: Decay = 0.95
    """momentum and muon: decay rate of the sum of gradients."""

    nesterov: bool = False
    """momentum: look one step ahead (Sutskever et al. 2013), as muon always does."""

    sensitivity_beta: Decay = 0.85
    """sage: decay rate of the running mean of sensitivities."""

    hessian_every: PositiveInt = 10
    """sophia: steps from one estimate of the Hessian's diagonal to the next (k)."""

    hessian_scale: PositiveFloat = 0.05
    """sophia: factor on that diagonal (gamma; its authors have 0.05 for sophia-g and 0.01 for sophia-h): the smaller,
    the more elements take a step of the whole learning rate."""

    rates: dict[str, PositiveFloat] = Field(default={})
    """Factors on the learning rate by pattern of parameter names, as in {"embed.*" = 0.5}; the first match counts."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay, on matrices only (not on norms and biases): beside the gradient, times the learning rate
    (decoupled: Loshchilov & Hutter 2019); of adam, adagrad and momentum a term of the gradient."""

    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""

    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """After the warm-up: cosine or linear to the minimum; wsd (warm-up, stable, linear decay: Hu et al. 2024);
    inverse-sqrt, as 1 / sqrt(step) but not below the minimum (Vaswani et al. 2017); or constant."""

    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""

    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    """wsd: the last part of the steps after the warm-up, in which the rate falls."""

    minimum: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a part of the peak."""
