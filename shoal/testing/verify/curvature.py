"""Sophia's estimates on one device: a plain model, whole parameters, one sample after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.boxes import Box
from shoal.engine.data.batches import Batch
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import draw_labels, label_key
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer
from shoal.engine.optim.sophia import Sophia
from shoal.spec.config import RunConfig
from shoal.testing.verify.emulate import gradient_of
from shoal.training.step.curvature import SHIFT


def learn_curvature(
    model: Transformer, config: RunConfig, rule: Sophia, batches: Sequence[Batch], step: int
) -> None:
    """Give the rule of a whole model, whose shards are the parameters in order, the estimate of a step.

    Args:
        batches: the samples of the step, one by one.
    """
    estimate = _drawn_labels if config.optimizer.name == "sophia-g" else _differences
    rule.learn([each.flatten() for each in estimate(model, config, batches, step)])


def _drawn_labels(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    tokens, length = _count(batches), config.data.sequence_length
    key, first = label_key(config.train.seed, step), step * config.train.global_batch

    def loss(i: int, batch: Batch) -> Tensor:
        logits = model(batch.tokens, None, batch.documents)
        labels = draw_labels(logits, key, (first + i) * length + torch.arange(length)[None])
        labels[batch.targets == IGNORE] = IGNORE
        return F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, reduction="sum")

    return [tokens * gradient**2 for gradient in _gradients(model, batches, loss)]


def _differences(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    parameters = dict(model.named_parameters())
    kept = [p.detach().clone() for p in parameters.values()]
    directions = [torch.empty_like(values) for values in kept]
    for name, direction in zip(parameters, directions, strict=True):
        shape = tuple(direction.shape)
        fill(
            direction, name=f"hutchinson.{step}.{name}", whole=shape, box=Box.whole(shape),
            initial=Initial(0.0, 1.0), seed=config.train.seed,
        )
    size = SHIFT * torch.cat([values.flatten() for values in kept]).square().mean().sqrt().item()
    found = []
    for sign in (1, -1, 0):
        with torch.no_grad():
            for p, values, direction in zip(parameters.values(), kept, directions, strict=True):
                p.copy_(values + sign * size * direction)
        if sign:
            loss = lambda i, batch: model(batch.tokens, batch.targets, batch.documents)  # noqa: E731
            found.append(_gradients(model, batches, loss))
    return [u * (one - other) / (2 * size) for u, one, other in zip(directions, *found, strict=True)]


def _gradients(model: Transformer, batches: Sequence[Batch], loss: Callable[[int, Batch], Tensor]) -> list[Tensor]:
    """Gradients of the loss summed over the samples and divided by the number of unmasked tokens."""
    model.zero_grad(set_to_none=False)  # the update holds on to them
    for i, batch in enumerate(batches):
        (loss(i, batch) / _count(batches)).backward()
    return [gradient_of(p).clone() for p in model.parameters()]


def _count(batches: Sequence[Batch]) -> int:
    return max(1, sum(batch.unmasked() for batch in batches))
