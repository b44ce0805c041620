"""Optimizer updates of one step: one of the full model, or several of each stage in an asynchronous pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.base.errors import DivergenceError
from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.pipeline.program import Action
from shoal.training.step.engine_state import EngineState


class NonFinite(DivergenceError):
    """Error for a loss or gradient norm that is NaN or infinite.

    Attributes:
        untouched: whether the weights are unchanged by the step.
    """

    def __init__(self, message: str, *, untouched: bool = True):
        super().__init__(message)
        self.untouched = untouched


@dataclass(frozen=True)
class StepResult:
    """Result of one step, equal on all ranks.

    Attributes:
        loss: mean over the unmasked tokens of the global batch [nats]; 0 without any.
        gradient_norm: norm over the full model before clipping (mean over the updates, if several); not finite if the
            step was skipped.
        learning_rate: learning rate of the update.
        tokens: unmasked targets in the global batch, or the terms of another loss.
        stop: whether any rank was asked to stop.
        loss_scale: factor on the loss; 1 without loss scaling.
        skipped: whether the update was skipped because a gradient overflowed.
        met: whether the replicas are equal now. If not (`parallel.sync`), all other fields describe this replica only.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: float
    stop: bool = False
    loss_scale: float = 1.0
    skipped: bool = False
    met: bool = True


def sum_totals(engine: EngineState, loss: Tensor, stop: bool, *square_norms: Tensor) -> Tensor:
    """Sum over all ranks, on the device: loss, stop requests and squared gradient norms. Collective."""
    loss = loss * (engine.mesh.index("tp") == 0)  # equal on all tensor-parallel ranks
    mine = torch.stack((loss, torch.full_like(loss, stop), *square_norms))
    return all_reduce(mine, engine.mesh.group("world"))


def clip_factor(engine: EngineState, norm: float) -> float:
    """Return the factor that clips gradients with this norm (`optimizer.clip_norm`)."""
    clip = engine.config.optimizer.clip_norm
    return clip / norm if clip and norm > clip else 1.0


# ---- asynchronous pipelines ------------------------------------------------------------------------------------------


class StageUpdates:
    """Updates of this rank's stage in one step of an asynchronous pipeline.

    A stage does not wait for the other stages' finiteness checks. After a non-finite gradient it makes no further
    update; all ranks learn of it at the end of the step.
    """

    def __init__(self, engine: EngineState, step: int):
        self.engine, self.step = engine, step
        # This rank's share of the squared gradient norm, by update.
        self.square_norms = torch.zeros(engine.program.updates, dtype=torch.float64, device=engine.mesh.device)
        self.failed = 0  # first version whose update was not made

    def update(self, rate: float, action: Action) -> None:
        """Make one update, unless its gradient or an earlier one was not finite."""
        self.engine.complete_gradients()
        self.divide(action)
        share = self.engine.parameters.square_norm()
        self.square_norms[action.version - 1] = share
        stage = share.clone()
        for axis in ("tp", "replicas"):  # so that all ranks of the stage decide the same
            all_reduce(stage, self.engine.mesh.group(axis))
        if not self.failed and math.isfinite(to_host(stage)):
            self.engine.optimizer.step(rate)
            self.engine.refresh_parameters()
        elif not self.failed:
            self.failed = action.version

    def divide(self, action: Action) -> None:
        """Divide the gradients of an update by the number of its terms, if their loss was not."""

    def result(self, loss: Tensor, tokens: float, rate: float, *, stop: bool) -> StepResult:
        """Return the loss and the mean gradient norm of the step. Collective.

        Raises:
            NonFinite: on every rank; the message names the first update that was not made, and its rank.
        """
        mesh = self.engine.mesh
        loss_sum, stops, *squares = to_host(sum_totals(self.engine, loss, stop, *self.square_norms))
        mean = loss_sum / (tokens or 1)
        if not all(map(math.isfinite, (mean, *squares))):
            failed = (self.failed, -mesh.index("pp"), mesh.describe())
            found = all_gather(failed, world() if mesh.layout.world_size > 1 else None)
            version, _, where = min((each for each in found if each[0]), default=(0, 0, "no rank"))
            raise NonFinite(
                f"step {self.step}: loss {mean:g}; the gradient of update {version} of {len(squares)} is not finite "
                f"on {where}, which made neither it nor the later ones",
                untouched=False,
            )
        return StepResult(mean, sum(map(math.sqrt, squares)) / len(squares), rate, tokens, stops > 0)
