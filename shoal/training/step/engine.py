"""Training engine of one rank: run steps, validate, and list the state that a checkpoint stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.device import peak_flops
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.optim.sophia import Sophia
from shoal.engine.streams import to_device
from shoal.pipeline.program import Action
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.records.metrics import StepMetrics
from shoal.training.step.curvature import estimate
from shoal.training.step.engine_state import EngineState
from shoal.training.step.late_step import StartedStep, starts_early, update_on_device
from shoal.training.step.optimizer_step import NonFinite, StageUpdates, StepResult, clip_factor, sum_totals
from shoal.training.step.source_losses import SourceLosses


class Engine(EngineState):
    """Training engine of one rank: steps, validation loss, and the state for checkpoints.

    Attributes:
        starts_early: whether `start` is possible, and `step` uses it.
        gradient_terms: number of loss terms by which the gradients are still to be divided; 1 if the loss was.
        stage_updates: class of the updates in an asynchronous pipeline.
    """

    stage_updates: type[StageUpdates] = StageUpdates

    def __init__(
        self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset, *, initial: bool = True
    ):
        super().__init__(config, shape, mesh, samples, initial=initial)
        self.starts_early = starts_early(self)
        self.gradient_terms = 1.0

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        """Run one step.

        Args:
            step: step number, from 0; determines the samples.
            stop: whether this rank was asked to stop; the result has it for all ranks.
            dry: leave the weights unchanged; loss and norm of the result are then NaN.

        Raises:
            NonFinite: on every rank, before any weight is changed (in an asynchronous pipeline, any of that stage).
        """
        if self.starts_early and not dry:
            return self.start(step, stop=stop).read()
        batches = self.get_batches(step)
        updates = [self.program.update_by_microbatch[m] for m in range(self.microbatches)]
        tokens = self.count_tokens(batches, updates, self.loss_replicas)
        rate = self.learning_rate(step)
        loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        for counts in self.layer_counts:
            counts.begin()
        scale = np.array([loss_scale / max(1, tokens[update]) for update in updates])
        # Routers start the backward of their own losses, which are means over sequences.
        sequences = self.config.train.global_batch / loss_scale
        batches = self._move(batches, sequences)
        if not dry and isinstance(self.optimizer, Sophia) and self.optimizer.due:
            self.optimizer.learn(estimate(self, step, batches, sum(tokens)))
        by_stage = self.stage_updates(self, step) if self.program.updates > 1 else None

        def update(action: Action, loss: Tensor) -> StepResult | None:
            if dry:
                self.complete_gradients()
            elif by_stage:
                by_stage.update(rate, action)
            else:
                return self.update(step, sum(tokens), rate, stop, loss)
            return None

        loss, result = self.runtime.step(batches, scale, update)
        if dry:
            return StepResult(math.nan, math.nan, rate, sum(tokens))
        if by_stage:
            result = by_stage.result(loss, sum(tokens), rate, stop=stop)
        if self.float8:
            self.float8.end_step(self.mesh.group("world"))
        assert result is not None, "every program has an update"
        return result

    def start(self, step: int, *, stop: bool = False) -> StartedStep:
        """Launch one step without waiting for its result (`shoal.training.step.late_step`)."""
        batches = self.get_batches(step)
        unmasked = torch.tensor([sum(batch.unmasked() for batch in batches)])
        counts = all_reduce(to_device(unmasked, self.mesh.device), self.loss_replicas)
        for layer_counts in self.layer_counts:
            layer_counts.begin()
        rate = self.learning_rate(step)
        scale = [counts[0].clamp(min=1).double().reciprocal()] * len(batches)

        def update(action: Action, loss: Tensor) -> StartedStep:
            self.complete_gradients()
            for layer_counts in self.layer_counts:
                layer_counts.count()
            return update_on_device(self, step, counts, rate, stop, loss)

        _, started = self.runtime.step(self._move(batches, self.config.train.global_batch), scale, update)
        assert started is not None, "every program has an update"
        return started

    def _move(self, batches: Sequence[Batch], sequences: float) -> list[Batch]:
        return [replace(batch.to(self.mesh.device), sequences=sequences) for batch in batches]

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        """Clip the gradients by their norm over all stages and update the weights.

        The update is skipped if a scaled gradient overflowed. All ranks decide the same, as the norm is finite only if
        every gradient is.

        Args:
            tokens: unmasked targets in the global batch, or the terms of another loss.
            loss: sum over this rank's micro-batches [nats].

        Raises:
            NonFinite: on every rank, before any weight is changed.
        """
        self.complete_gradients()
        loss_sum, stops, square = to_host(sum_totals(self, loss, stop, self.parameters.square_norm()))
        mean, norm = loss_sum / (tokens or 1), math.sqrt(square) if square >= 0 else math.nan
        scale, loss_scale = self.loss_scale, self.loss_scale.value if self.loss_scale else 1.0
        overflowed = not math.isfinite(norm)
        if not math.isfinite(mean) or (overflowed and (scale is None or scale.exhausted)):
            smallest = f" with the smallest loss scale, {loss_scale:g}" if scale else ""
            raise NonFinite(f"step {step}: loss {mean:g}, gradient norm {norm:g}{smallest}")
        for counts in self.layer_counts:
            counts.count()
        if scale and overflowed:
            scale.overflowed()
            return StepResult(mean, norm, rate, tokens, stops > 0, loss_scale, skipped=True)
        scaled_by = loss_scale * self.gradient_terms
        norm /= scaled_by
        factor = clip_factor(self, norm) / scaled_by
        if factor != 1:
            self.parameters.scale(factor)
        self.optimizer.step(rate)
        self.refresh_parameters()
        if self.routing:
            self.routing.rebalance()
        if scale:
            scale.made()
        return StepResult(mean, norm, rate, tokens, stops > 0, loss_scale)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        return learning_rate(step, self.config.train.steps, self.config.optimizer)

    # ---- validation and metrics ----------------------------------------------------------------------------------

    @property
    def validation_sequences(self) -> int:
        """Number of samples of a validation: as configured, rounded up to full passes."""
        return -(-self.config.train.validation_sequences // self.per_pass) * self.per_pass

    def evaluate(self, samples: Dataset) -> float:
        """Return the validation loss: mean [nats per token] of the first `validation_sequences` samples.

        Sets ``validated`` to the expert metrics of these passes, and the loss of each source of a mixture.
        """
        if self.routing:
            self.routing.begin_validation()
        by_source = SourceLosses(samples, self.stages, self.mesh)
        found = self.sum_loss(samples, 0, self.validation_sequences // self.per_pass, by_source)
        if self.routing:
            self.validated = self.routing.end_validation(self.validation_sequences, self.config.data.sequence_length)
        if (losses := by_source.take()) is not None:
            self.validated["sources"] = losses
        return found.mean

    def sum_peak_flops(self, local_ranks: int) -> float | None:
        """Return the summed peak FLOP/s of all ranks, for the MFU; None if any rank's is unknown. Collective.

        One rank of each machine answers for all of them, as a measurement takes as long as some steps of a small model.

        Args:
            local_ranks: number of ranks on each machine.
        """
        kind = compute = self.policy.compute
        if self.float8 is not None and self.float8.native(compute, self.mesh.device):
            kind = torch.float4_e2m1fn_x2 if self.float8.recipe.rotates else torch.float8_e4m3fn
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.rank % local_ranks == 0:
            own = peak_flops(kind, self.mesh.device, local_ranks)
            total += torch.tensor([local_ranks * (own or 0.0), float(own is None)], device=self.mesh.device)
        rate, unknown = to_host(all_reduce(total, self.mesh.group("world")))
        return None if unknown else rate

    def step_metrics(self) -> dict[str, Any]:
        """Return further metrics of the last step, such as of routers, as fields of `StepMetrics`."""
        batch = self.config.train.global_batch, self.config.data.sequence_length
        return {name: value for counts in self.layer_counts for name, value in counts.metrics(*batch).items()}

    def logged(self, metrics: StepMetrics) -> None:
        """Note a record that rank 0 has written."""

    def saved(self, step: int, folder: AnyPath) -> None:
        """Note on rank 0 that a checkpoint is complete."""

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Piece]]:
        """Return all tensors that a checkpoint stores, under names that do not depend on the layout."""
        state = {f"model.{name}": pieces for name, pieces in self.weights().items()}
        state |= flat_names("optimizer", self.optimizer.states())
        if self.float8 and self.float8.history:
            state |= self.float8.history.state(primary=self.mesh.rank == 0)
        return state

    def restored(self, updates: int) -> None:
        """Apply a state that was loaded after ``updates`` updates."""
        self.optimizer.resume_at(updates)
        self.failed.zero_()
        self.source_losses.reset()  # steps after that state are rerun, or their batches are skipped
        if self.float8 and self.float8.history:
            self.float8.history.restored()
        self.parameters.gather()


def flat_names(prefix: str, kinds: Mapping[str, Mapping[str, list[Piece]]]) -> dict[str, list[Piece]]:
    """Name the pieces of each kind of state of each parameter ``prefix.kind.parameter``."""
    return {f"{prefix}.{kind}.{name}": pieces for kind, named in kinds.items() for name, pieces in named.items()}
