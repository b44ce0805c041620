"""Estimates of the Hessian's diagonal for Sophia on any layout, by the passes that make gradients.

Both are unbiased for the loss of the step's own samples. Their random draws depend on (seed, step, place in the model
or in the data) alone, so that every layout draws the same.

- Gauss-Newton-Bartlett (Liu et al. 2023, algorithm 2): one more forward and backward, for labels that the model draws
  from its own distribution. With g the gradient of their mean loss over B tokens it is B g o g, and never negative.
- Hutchinson (algorithm 1): u o (H u) for a normal u. The product H u is the central difference of the gradients at
  weights + d u and weights - d u, two forwards and backwards: no operation, schedule or shard needs a second
  derivative. Its error is of order d^2, far below the estimator's own spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.engine.collectives.ops import all_gather, all_reduce, to_host
from shoal.engine.data.batches import Batch
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import draw, key_of_step
from shoal.engine.models.loss import IGNORE
from shoal.engine.optim.shards import Shard
from shoal.training.step.engine_state import EngineState
from shoal.training.step.optimizer_step import NonFinite

SHIFT = 1e-3
"""d, relative to the root mean square of the weights: errors of the difference of 5e-5, and its rounding of fp32."""


def estimate(engine: EngineState, step: int, batches: Sequence[Batch], tokens: int) -> list[Tensor]:
    """Estimate the diagonal: a tensor for each of the optimizer's shards, which may be the memory of its gradient.

    Args:
        batches: this replica's micro-batches of the step, on the device.
        tokens: unmasked targets in the global batch.

    Raises:
        NonFinite: on every rank, before the optimizer has it: its moving average would never lose a NaN.
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
    """Algorithm 2, over the unmasked tokens of the step."""
    length, numbered = engine.config.data.sequence_length, []
    labels = _labels(engine, key_of_step(engine.config.train.seed, step))
    for microbatch, batch in enumerate(batches):
        sample = torch.tensor(engine.sample_indices(step, microbatch))
        index = (sample[:, None] * length + torch.arange(length)).to(batch.targets.device)
        numbered.append(replace(batch, targets=index.where(batch.targets != IGNORE, IGNORE), labels=labels))
    _backward(engine, numbered, tokens)
    return [gradient.square_().mul_(tokens) for gradient in _gradients(engine)]  # which the step makes anew


def _labels(engine: EngineState, key: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from logits and token numbers (in the place of targets) to drawn labels."""
    tp, rank = engine.mesh.size("tp"), engine.mesh.index("tp")
    rows = -(-engine.shape.vocab // tp)
    here = min(rows, max(0, engine.shape.vocab - rank * rows))  # without padding
    gather = partial(_stack, engine.mesh.group("tp"))

    def labels(logits: Tensor, index: Tensor) -> Tensor:
        drawn = draw(logits[..., :here], key, index, start=rank * rows, part=rank, gather=gather)
        return drawn.where(index != IGNORE, IGNORE)

    return labels


def _stack(group, x: Tensor) -> Tensor:
    return all_gather(x.unsqueeze(0), group)


def hutchinson(engine: EngineState, step: int, batches: Sequence[Batch], tokens: int) -> list[Tensor]:
    """Algorithm 1, with the Hessian-vector product by a central difference.

    In the second backward two numbers are alive for each weight besides it: its old value, and the first gradient. The
    direction is drawn again where it is needed, in the memory of the weights.
    """
    shards, seed = engine.optimizer.shards.shards, engine.config.train.seed
    size = SHIFT * _root_mean_square(engine)
    kept = [shard.weights.clone() for shard in shards]

    def direction(shard: Shard) -> Tensor:
        shard.weights.zero_()  # padding too
        for part in shard.parts:
            fill(
                part.piece(shard.weights).tensor, name=f"hutchinson.{step}.{part.name}", whole=part.whole,
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
    """The root mean square of all weights of the model, each counted once."""
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    for shard in engine.optimizer.shards.shards:
        for part in shard.parts:
            if part.primary:
                total += torch.linalg.vector_norm(shard.weights[part.slice]).double().square().to(total.device)
    return math.sqrt(to_host(all_reduce(total, engine.mesh.group("world"))) / engine.shape.parameters())


def _backward(engine: EngineState, batches: Sequence[Batch], tokens: int) -> None:
    """Compute the complete gradients of the mean loss where the optimizer reads them, and update nothing."""
    engine.runtime.step(
        batches, np.full(len(batches), 1 / tokens), lambda action, loss: engine.parameters.sum_ends()
    )


def _gradients(engine: EngineState) -> list[Tensor]:
    """The gradients in the number format of the weights, which may be wider than that of the sums."""
    return [shard.gradient.to(shard.weights.dtype) for shard in engine.optimizer.shards.shards]


@contextmanager
def _unrecorded(engine: EngineState):
    """Keep these passes out of profiles and histograms, which are of the step's own."""
    recorders, engine.runtime.recorders = engine.runtime.recorders, []
    engine.estimating = True
    try:
        yield
    finally:
        engine.runtime.recorders, engine.estimating = recorders, False
