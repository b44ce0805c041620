"""Hessian diagonal estimates for Sophia on any layout, using the ordinary forward and backward passes.

Both estimators are unbiased for the loss of the step's own samples. Their random draws depend only on (seed, step,
position in the model or in the data), so every layout draws the same numbers.

- Gauss-Newton-Bartlett (Liu et al. 2023, algorithm 2): one additional forward and backward with labels drawn from the
  model's own distribution. With g the gradient of their mean loss over B tokens, the estimate is B g o g, which is
  never negative.
- Hutchinson (algorithm 1): u o (H u) for a normal u. The product H u is the central difference of the gradients at
  weights + d u and weights - d u, two forwards and backwards: no operation, schedule or shard needs a second
  derivative. The error is of order d^2, far below the variance of the estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal.engine.collectives.ops import all_gather, all_reduce, to_host
from shoal.engine.data.batches import Batch
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import draw_labels, label_key
from shoal.engine.models.loss import IGNORE
from shoal.engine.optim.shards import Shard
from shoal.training.step.engine_state import EngineState
from shoal.training.step.optimizer_step import NonFinite

SHIFT = 1e-3
"""d, relative to the RMS of the weights: the difference has an error of 5e-5 plus fp32 rounding."""


def estimate(engine: EngineState, step: int, batches: Sequence[Batch], tokens: int) -> list[Tensor]:
    """Estimate the Hessian diagonal: one tensor per optimizer shard, which may share memory with its gradient.

    Args:
        batches: micro-batches of this replica in the step, on the device.
        tokens: unmasked targets in the global batch.

    Raises:
        NonFinite: on every rank, before the optimizer uses the estimate: its moving average would keep a NaN forever.
    """
    with _unrecorded(engine):
        make = gauss_newton_bartlett if engine.config.optimizer.name == "sophia-g" else hutchinson
        found = make(engine, step, batches, max(1, tokens))
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    for part in found:
        total += torch.linalg.vector_norm(part, dtype=torch.float64).to(total.device)
    if not math.isfinite(to_host(all_reduce(total, engine.mesh.group("world")))):
        raise NonFinite(f"step {step}: Sophia's estimate of the Hessian is not finite")
    return found


def gauss_newton_bartlett(engine: EngineState, step: int, batches: Sequence[Batch], tokens: int) -> list[Tensor]:
    """Compute the Gauss-Newton-Bartlett estimate (algorithm 2) over the unmasked tokens of the step."""
    length, numbered = engine.config.data.sequence_length, []
    labels = _labels(engine, label_key(engine.config.train.seed, step))
    for microbatch, batch in enumerate(batches):
        sample = torch.tensor(engine.sample_indices(step, microbatch))
        index = (sample[:, None] * length + torch.arange(length)).to(batch.targets.device)
        numbered.append(replace(batch, targets=index.where(batch.targets != IGNORE, IGNORE), labels=labels))
    _backward(engine, numbered, tokens)
    return [gradient.square_().mul_(tokens) for gradient in _gradients(engine)]  # in place: the step recomputes them


def _labels(engine: EngineState, key: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that draws labels from logits and token indices (passed in place of targets)."""
    tp, rank, group = engine.mesh.size("tp"), engine.mesh.index("tp"), engine.mesh.group("tp")
    rows = engine.shape.vocabulary_rows(tp)
    used = min(rows, max(0, engine.shape.vocab - rank * rows))  # without padding

    def labels(logits: Tensor, index: Tensor) -> Tensor:
        drawn = draw_labels(
            logits[..., :used], key, index, start=rank * rows, part=rank,
            gather=lambda x: all_gather(x.unsqueeze(0), group),
        )
        return drawn.where(index != IGNORE, IGNORE)

    return labels


def hutchinson(engine: EngineState, step: int, batches: Sequence[Batch], tokens: int) -> list[Tensor]:
    """Compute Hutchinson's estimate (algorithm 1), with the Hessian-vector product as a central difference.

    During the second backward each weight needs two further values: its old value and the first gradient. The direction
    is redrawn into the memory of the weights where it is needed.
    """
    shards, seed = engine.optimizer.shards.shards, engine.config.train.seed
    size = SHIFT * _root_mean_square(engine)
    engine.optimizer.wait_for_reads()
    kept = [shard.weights.clone() for shard in shards]

    def direction(shard: Shard) -> Tensor:
        shard.weights.zero_()  # padding too
        for part in shard.parts:
            fill(
                part.piece(shard.weights).tensor, name=f"hutchinson.{step}.{part.name}", global_shape=part.global_shape,
                box=part.box, initial=Initial(0.0, 1.0), seed=seed,
            )
        return shard.weights

    def move(by: float) -> None:
        for shard, weights in zip(shards, kept, strict=True):
            torch.add(weights, direction(shard), alpha=by, out=shard.weights)
        engine.parameters.gather()

    move(size)
    _backward(engine, batches, tokens)
    found = [gradient.clone() for gradient in _gradients(engine)]
    move(-size)
    _backward(engine, batches, tokens)
    for shard, weights, one in zip(shards, kept, found, strict=True):
        one.sub_(shard.gradient).mul_(direction(shard)).mul_(1 / (2 * size))
        shard.weights.copy_(weights)
    engine.parameters.gather()
    return found


def _root_mean_square(engine: EngineState) -> float:
    """Return the root mean square of all weights of the model, each counted once."""
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    for shard in engine.optimizer.shards.shards:
        for part in shard.parts:
            if part.primary:
                total += torch.linalg.vector_norm(shard.weights[part.slice]).double().square().to(total.device)
    return math.sqrt(to_host(all_reduce(total, engine.mesh.group("world"))) / engine.shape.parameters())


def _backward(engine: EngineState, batches: Sequence[Batch], tokens: int) -> None:
    """Compute the complete gradients of the mean loss where the optimizer reads them, without an update."""
    engine.runtime.step(
        batches, np.full(len(batches), 1 / tokens), lambda action, loss: engine.parameters.sum_ends()
    )


def _gradients(engine: EngineState) -> list[Tensor]:
    """Return the gradients in the dtype of the weights, which may be wider than that of the sums."""
    return [shard.gradient.to(shard.weights.dtype) for shard in engine.optimizer.shards.shards]


@contextmanager
def _unrecorded(engine: EngineState):
    """Exclude the enclosed passes from profiles, histograms and the losses of sources."""
    runtime = engine.runtime
    before = runtime.recorders, runtime.on_loss
    runtime.recorders, runtime.on_loss, engine.estimating = [], None, True
    try:
        yield
    finally:
        (runtime.recorders, runtime.on_loss), engine.estimating = before, False
