"""Sophia's curvature estimates on one device: a plain model with full parameters, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.boxes import Box
from shoal.engine.data.batches import Batch
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import draw_labels, label_key
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer
from shoal.spec.config import RunConfig
from shoal.testing.verify.emulate import accumulate_gradients, count_tokens, gradient_of
from shoal.training.step.curvature import SHIFT


def estimate_curvature(
    model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int
) -> list[Tensor]:
    """Return the estimate of a step for each parameter in order, flattened.

    Args:
        batches: single samples of the step.
    """
    estimate = _from_drawn_labels if config.optimizer.name == "sophia-g" else _from_differences
    return [each.flatten() for each in estimate(model, config, batches, step)]


def _from_drawn_labels(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    length = config.data.sequence_length
    key, first = label_key(config.train.seed, step), step * config.train.global_batch

    def compute_loss(i: int, batch: Batch) -> Tensor:
        logits = model(batch.tokens, None, batch.documents)
        labels = draw_labels(logits, key, (first + i) * length + torch.arange(length)[None])
        labels[batch.targets == IGNORE] = IGNORE
        return F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, reduction="sum")

    accumulate_gradients(model, batches, compute_loss)
    return [count_tokens(batches) * gradient_of(p) ** 2 for p in model.parameters()]


def _from_differences(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    parameters = dict(model.named_parameters())
    kept = [p.detach().clone() for p in parameters.values()]
    directions = [torch.empty_like(values) for values in kept]
    for name, direction in zip(parameters, directions, strict=True):
        shape = tuple(direction.shape)
        fill(
            direction, name=f"hutchinson.{step}.{name}", global_shape=shape, box=Box.whole(shape),
            initial=Initial(0.0, 1.0), seed=config.train.seed,
        )
    size = SHIFT * torch.cat([values.flatten() for values in kept]).square().mean().sqrt().item()
    found = []
    for sign in (1, -1, 0):
        with torch.no_grad():
            for p, values, direction in zip(parameters.values(), kept, directions, strict=True):
                p.copy_(values + sign * size * direction)
        if sign:
            accumulate_gradients(model, batches, lambda i, batch: model(batch.tokens, batch.targets, batch.documents))
            found.append([gradient_of(p).clone() for p in parameters.values()])
    return [u * (one - other) / (2 * size) for u, one, other in zip(directions, *found, strict=True)]
