"""One rank's training engine: the way of a step, from the step's number to updated weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch

from shoal.base.boxes import Piece
from shoal.engine.collectives.ops import all_reduce, read
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.optim.sophia import Sophia
from shoal.pipeline.from_layout import build_forwards
from shoal.training.step.curvature import estimate
from shoal.training.step.engine_state import EngineState
from shoal.training.step.mixture_of_depths import Foreseen
from shoal.training.step.optimizer_step import ManyUpdates, OneUpdate
from shoal.training.step.routing import Routed


@dataclass(frozen=True)
class StepResult:
    """What one step computed, equal on all ranks.

    Attributes:
        loss: mean over the global batch's unmasked tokens [nats].
        gradient_norm: of the whole model, before clipping (the mean over several updates); not finite where the step
            was skipped.
        learning_rate: that the update used.
        tokens: unmasked targets in the global batch.
        stop: whether any rank was asked to stop.
        loss_scale: that the loss was multiplied by; 1 without one.
        skipped: whether no update was made, since a gradient overflowed.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    stop: bool
    loss_scale: float = 1.0
    skipped: bool = False


class Engine(EngineState):
    """Runs steps, measures the validation loss, and says what a checkpoint holds."""

    # ---- one step ----------------------------------------------------------------------------------------------

    @overload
    def step(self, step: int, *, stop: bool = False, dry: Literal[False] = False) -> StepResult: ...

    @overload
    def step(self, step: int, *, stop: bool = False, dry: bool) -> StepResult | None: ...

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult | None:
        """Run step number ``step`` (0 is the first): its samples are a pure function of that number.

        Args:
            stop: whether this rank was asked to stop; all ranks learn it from the result.
            dry: compute everything but leave the weights alone; returns None.

        Raises:
            NonFinite: on every rank alike, before any weight is changed (`ManyUpdates`: of that stage).
        """
        batches = self.batches_of(step)
        update_of = self.program.update_of
        tokens = self._count(batches, [update_of[m] for m in range(self.microbatches)])
        rate = learning_rate(step, self.config.train.steps, self.config.optimizer)
        kind = ManyUpdates if self.program.updates > 1 else OneUpdate
        if self.routing:
            self.routing.begin()
        if self.depths:
            self.depths.begin()
        updates = kind(self, step, sum(tokens), stop=stop, rate=None if dry else rate)
        loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        for stage in self.stages:  # routers begin the backward of their own losses, which are means over sequences
            stage.module.sequences = self.config.train.global_batch / loss_scale
        scale = np.array([loss_scale / max(1, tokens[update_of[m]]) for m in range(self.microbatches)])
        batches = [batch.to(self.mesh.device) for batch in batches]
        if not dry and isinstance(self.optimizer, Sophia) and self.optimizer.due:
            self.optimizer.learn(estimate(self, step, batches, sum(tokens)))
        updates.finish(self.runtime.step(batches, scale, updates))
        if dry:
            return None
        if self.float8:
            self.float8.end_step(self.mesh.group("world"))
        return StepResult(
            updates.loss, updates.norm, rate, updates.tokens, updates.stopped, loss_scale, updates.skipped
        )

    def _count(self, batches: Sequence[Batch], update_of: Sequence[int]) -> list[int]:
        """Unmasked targets of each update's micro-batches, of all replicas."""
        counts = torch.zeros(max(update_of) + 1, dtype=torch.int64)
        for batch, update in zip(batches, update_of, strict=True):
            counts[update] += batch.unmasked()
        return read(all_reduce(counts.to(self.mesh.device), self.mesh.group("dp")))

    def evaluate(self, samples: Dataset) -> float:
        """Mean loss [nats per token] of the first ``validation_sequences`` samples, rounded up to whole passes.

        What routers did in them is then in ``validated``.
        """
        per_pass = self.config.parallel.micro_batch * self.config.parallel.dp
        passes = -(-self.config.train.validation_sequences // per_pass)
        program = build_forwards(self.program, passes)
        batches = [samples.batch(self._validation_indices(m)) for m in range(passes)]
        tokens = max(1, *self._count(batches, [0] * passes))
        batches = [batch.to(self.mesh.device) for batch in batches]
        if self.routing:
            self.routing.begin_validation()
        loss = self._runtime(program).evaluate(batches) * (self.mesh.index("tp") == 0)
        if self.routing:
            self.validated = self.routing.end_validation(passes * per_pass, self.config.data.sequence_length)
        return read(all_reduce(loss, self.mesh.group("world"))) / tokens

    def _validation_indices(self, microbatch: int) -> range:
        n = self.config.parallel.micro_batch
        start = (microbatch * self.config.parallel.dp + self.mesh.index("dp")) * n
        return range(start, start + n)

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Piece]]:
        """Everything that a checkpoint holds, under names that are the same on every layout."""
        state = {f"model.{name}": pieces for name, pieces in self.weights().items()}
        for kind, parameters in self.optimizer.states().items():
            state |= {f"optimizer.{kind}.{name}": pieces for name, pieces in parameters.items()}
        if self.float8 and self.float8.history:
            state |= self.float8.history.state(primary=self.mesh.rank == 0)
        return state

    def routed(self) -> Routed | None:
        """What the routers did in the last step; None without experts."""
        if self.routing is None:
            return None
        return Routed.of(self.routing.totals, self.shape, self.config.train.global_batch,
                         self.config.data.sequence_length)

    def foreseen(self) -> Foreseen | None:
        """How well it was foreseen in the last step which tokens pass through layers; None where all do."""
        if self.depths is None:
            return None
        return self.depths.foreseen(self.config.train.global_batch, self.config.data.sequence_length)

    def weights(self) -> dict[str, list[Piece]]:
        """The pieces of the model on this rank: parameters, and the biases of routers."""
        return self.parameters.weights() | (self.routing.state() if self.routing else {})

    def restored(self, updates: int) -> None:
        """The state was overwritten with that after so many updates: spread it."""
        self.optimizer.resume_at(updates)
        if self.float8 and self.float8.history:
            self.float8.history.restored()
        self.parameters.gather()
