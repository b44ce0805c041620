"""Engine of a model of one's own: data parallelism, ZeRO and everything around a step, for any module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Piece
from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.engine.own.definition import SUM_AND_TERMS, load_own_model
from shoal.engine.own.optimizer import OwnRule
from shoal.engine.own.stage import OwnStage, build_own_stage
from shoal.engine.own.user_code import explained
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.pipeline.from_layout import build_forwards
from shoal.pipeline.program import Action
from shoal.training.records.metrics import StepMetrics
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import StepResult


class OwnEngine(Engine):
    """Training engine of one rank for the definition that ``model.module`` names.

    The number of terms of a loss is known only after its forward. So backward gives the gradients of the sum, which
    are divided before the update.

    Attributes:
        divisor: that of the loss before its backward, see `count_tokens`.
        metrics: means of the definition's metrics in the last step.
    """

    stage: OwnStage

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.starts_early = False  # terms are counted on the host
        self.divisor = 1
        self.metrics: dict[str, float] = {}

    def build_stages(self, trained: bool) -> tuple[list[LocalStage], RankParameters]:
        own, train = load_own_model(self.config.model.module), self.config.train
        self.stage = build_own_stage(own, self.sync_mesh, self.policy, train.seed)
        return [self.stage], RankParameters([self.stage.parameters])

    def initialise(self) -> None:
        self.stage.fill(self.stage.own.build(self.config.train.seed))

    def describe_module(self) -> nn.Module:
        return self.stage.module

    def build_optimizer(self, shards: Shards) -> Rule:
        make = self.stage.own.make_optimizer
        return OwnRule(self.config.optimizer, shards, make) if make else super().build_optimizer(shards)

    def learning_rate(self, step: int) -> float:
        schedule, steps = self.stage.own.schedule, self.config.train.steps
        if schedule is None:
            return super().learning_rate(step)
        with explained("its schedule()"):
            rate = float(schedule(step, steps))
        if not 0 <= rate < math.inf:
            raise UsageError(f"model.module: its schedule() returns {rate} for step {step} of {steps}.\n  Return a "
                             "learning rate from 0.")
        return rate

    def logged(self, metrics: StepMetrics) -> None:
        own = self.stage.own
        if own.on_step:
            with explained("its on_step()"):
                own.on_step(metrics)
        if own.on_validation and metrics.validation_loss is not None:
            with explained("its on_validation()"):
                own.on_validation(metrics)

    def saved(self, step: int, folder: AnyPath) -> None:
        if self.stage.own.on_save:
            with explained("its on_save()"):
                self.stage.own.on_save(step, folder)

    def step_metrics(self) -> dict[str, Any]:
        return {"metrics": self.metrics or None}

    def prefetches(self) -> bool:
        return super().prefetches() and not self.samples.draws  # type: ignore[attr-defined]

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        try:
            with explained("the backward of its loss", only_its_own=True):
                return super().step(step, stop=stop, dry=dry)
        finally:  # buffers of a step that failed, was skipped or dry are those before it
            self.stage.statistics.cancel()

    def count_tokens(self, batches: Sequence[Batch], updates: Sequence[int], replicas: Group | None) -> list[int]:
        """Begin a step; return for each update by what the loss is divided before its backward.

        That is 1, or with loss scaling a power of two near the terms of the step before, for the range of float16.
        """
        self.stage.begin()
        return [self.divisor] * (max(updates) + 1)

    def update(self, step: int, tokens: float, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        terms, self.metrics = self._totals()
        if not (terms > 0 or terms == float(loss) == 0):
            raise UsageError(f"model.module: the terms of its loss() in step {step} are {terms:g}, with a loss of "
                             f"{float(loss):g} on this rank.\n  {SUM_AND_TERMS}")
        self.gradient_terms = (terms or 1.0) / self.divisor
        if self.loss_scale:
            self.divisor = 1 << max(0, math.frexp(terms)[1])
        result = super().update(step, terms, rate, stop, action, loss)
        if not result.skipped:
            self.stage.statistics.end(self.mesh)
        return result

    def _totals(self) -> tuple[float, dict[str, float]]:
        """Return the terms of the losses and the means of the metrics, over all replicas. Collective."""
        found = self.stage.metrics
        each = torch.cat((self.stage.counted.view(1), *(found[name] for name in sorted(found))))
        terms, *pairs = to_host(all_reduce(each, self.mesh.group("dp")))
        means = zip(sorted(found), pairs[::2], pairs[1::2], strict=True)
        return terms, {name: total / (number or 1.0) for name, total, number in means}

    def evaluate(self, samples: Dataset) -> float:
        """Return the loss per term of the first `validation_sequences` samples; ``validated`` has the metrics."""
        layout = self.config.parallel
        n, per_pass = layout.micro_batch, layout.micro_batch * layout.dp
        passes = self.validation_sequences // per_pass
        first = [m * per_pass + self.mesh.index("dp") * n for m in range(passes)]
        batches = [samples.batch(range(start, start + n)).to(self.mesh.device) for start in first]
        self.stage.begin()
        loss = self.build_runtime(build_forwards(self.program, passes)).evaluate(batches)
        self.stage.statistics.cancel()  # some modules change buffers in each forward
        terms, metrics = self._totals()
        self.validated = {"metrics": metrics or None}
        return float(to_host(all_reduce(loss, self.mesh.group("dp")))) / (terms or 1.0)

    def state(self) -> dict[str, list[Piece]]:
        """Return all tensors that a checkpoint stores: also buffers and frozen parameters."""
        return super().state() | {f"model.{name}": pieces for name, pieces in self._kept().items()}

    def _kept(self) -> dict[str, list[Piece]]:
        return self.stage.state(self.mesh.rank)

    def _move(self, batches: Sequence[Any], sequences: float) -> list[Any]:
        return [batch.to(self.mesh.device) for batch in batches]
