"""Loss surfaces of two weights, and the ways of the update rules over them: the very rules that train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.engine.optim.build import build
from shoal.engine.optim.shards import Shards
from shoal.engine.optim.sophia import Sophia
from shoal.spec.config import OptimizerConfig

Point = tuple[float, float]
NAME = "layers.0.weight"  # by which Muon takes the two weights for a matrix inside a layer, of one row


class Surface(NamedTuple):
    """A loss of two weights.

    Attributes:
        name, formula: for people.
        loss: [.., 2] -> [..].
        hessian: [2] -> the diagonal of the second derivatives there, [2].
        start: where the weights start.
        box: what is drawn, (left, bottom, right, top).
        levels: of the contours.
    """

    name: str
    formula: str
    loss: Callable[[Tensor], Tensor]
    hessian: Callable[[Tensor], Tensor]
    start: Point
    box: tuple[float, float, float, float]
    levels: tuple[float, ...]


SURFACES = (
    Surface(
        "a narrow valley", "(x² + 20 y²) / 2",
        lambda w: (w[..., 0] ** 2 + 20 * w[..., 1] ** 2) / 2,
        lambda w: torch.tensor([1.0, 20.0], dtype=w.dtype),
        (-2.0, 0.7), (-2.4, -1.4, 2.4, 1.4), (0.02, 0.1, 0.3, 0.7, 1.3, 2.2, 3.5, 5.5, 8.0, 12.0),
    ),
    Surface(
        "a saddle", "x² / 2 - y² / 2 + y⁴ / 4",
        lambda w: w[..., 0] ** 2 / 2 - w[..., 1] ** 2 / 2 + w[..., 1] ** 4 / 4,
        lambda w: torch.stack((torch.ones_like(w[0]), 3 * w[1] ** 2 - 1)),
        (-1.5, 0.01), (-1.9, -0.6, 1.7, 1.8), (-0.24, -0.2, -0.13, -0.05, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5),
    ),
)
"""A valley is long one way and steep the other. At a saddle the gradient is zero and the way down lies across: the
start is a hundredth beside the ridge, which plain descent leaves late."""


@dataclass(frozen=True)
class Way:
    """Where a rule goes.

    Attributes:
        label: the rule, with what was set.
        rate: its learning rate.
        points: the weights before the first step and after each.
        losses: there.
    """

    label: str
    rate: float
    points: tuple[Point, ...]
    losses: tuple[float, ...]


def walk(surface: Surface, config: OptimizerConfig, steps: int, label: str = "") -> Way:
    """Train two weights, with whole gradients. Sophia, for once, is given the Hessian's diagonal itself."""
    weights = torch.tensor([surface.start], dtype=torch.float64)  # [1, 2]
    gradient = torch.zeros_like(weights)
    rule = build(config, Shards.of([(NAME, weights, gradient)], lambda name, tensor: 0.0))
    points = [surface.start]
    for _ in range(steps):
        with torch.enable_grad():
            here = weights[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(surface.loss(here), here)
        gradient[0].copy_(slope)
        if isinstance(rule, Sophia) and rule.due:
            rule.learn([surface.hessian(weights[0])])
        rule.step(config.learning_rate)
        points.append(tuple(weights[0].tolist()))
    losses = surface.loss(torch.tensor(points, dtype=torch.float64)).tolist()
    return Way(label or config.name, config.learning_rate, tuple(points), tuple(losses))


RATES = tuple(factor * 10.0**power for power in (-3, -2, -1) for factor in (1, 2, 5))


def best_rate(surface: Surface, config: OptimizerConfig, steps: int) -> float:
    """Of `RATES`, the one with the least mean loss on the way."""
    def mean(rate: float) -> float:
        losses = walk(surface, config.model_copy(update={"learning_rate": rate}), steps).losses
        return sum(min(loss, 1e9) for loss in losses)

    return min(RATES, key=mean)
