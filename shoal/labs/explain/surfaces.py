"""Loss surfaces of two weights, and the paths of the training's own update rules over them."""

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
NAME = "layers.0.weight"  # makes Muon treat the two weights as a matrix of a layer, with one row


class Surface(NamedTuple):
    """A loss of two weights.

    Attributes:
        loss: [.., 2] -> [..].
        hessian: [2] -> the diagonal of the second derivatives, [2].
        start: initial weights.
        box: area of the drawing (left, bottom, right, top).
        levels: levels of the contours.
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
"""The valley is flat along x and steep along y. At the saddle the gradient is zero, and the descent is along y: the
start is 0.01 off the ridge, which plain descent leaves late."""


@dataclass(frozen=True)
class RulePath:
    """The path of an update rule.

    Attributes:
        label: the rule.
        rate: its learning rate.
        points: the weights before the first step and after each step.
        losses: the loss at each point.
    """

    label: str
    rate: float
    points: tuple[Point, ...]
    losses: tuple[float, ...]


def walk(surface: Surface, config: OptimizerConfig, steps: int, label: str = "") -> RulePath:
    """Train two weights. Sophia gets the exact diagonal of the Hessian."""
    weights = torch.tensor([surface.start], dtype=torch.float64)  # [1, 2]
    gradient = torch.zeros_like(weights)
    rule = build(config, Shards.from_parameters([(NAME, weights, gradient)], lambda name, tensor: 0.0))
    points = [surface.start]
    for _ in range(steps):
        with torch.enable_grad():
            point = weights[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(surface.loss(point), point)
        gradient[0].copy_(slope)
        if isinstance(rule, Sophia) and rule.due:
            rule.learn([surface.hessian(weights[0])])
        rule.step(config.learning_rate)
        points.append(tuple(weights[0].tolist()))
    losses = surface.loss(torch.tensor(points, dtype=torch.float64)).tolist()
    return RulePath(label or config.name, config.learning_rate, tuple(points), tuple(losses))


RATES = tuple(factor * 10.0**power for power in (-3, -2, -1) for factor in (1, 2, 5))


def find_best_rate(surface: Surface, config: OptimizerConfig, steps: int) -> float:
    """Return the learning rate of `RATES` with the least mean loss over the path."""
    def mean(rate: float) -> float:
        losses = walk(surface, config.model_copy(update={"learning_rate": rate}), steps).losses
        return sum(min(loss, 1e9) for loss in losses)

    return min(RATES, key=mean)
