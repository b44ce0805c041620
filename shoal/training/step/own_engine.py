"""Engine of a model of one's own: data parallelism, ZeRO and everything around a step, for any module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.own.definition import load_own_model
from shoal.engine.own.stage import OwnStage, build_own_stage
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.pipeline.from_layout import build_forwards
from shoal.pipeline.program import Action
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import StepResult


class OwnEngine(Engine):
    """Training engine of one rank for the definition that ``model.module`` names.

    The number of terms of a loss is known only after its forward. So backward gives the gradients of the sum, which
    are divided before the update.
    """

    stage: OwnStage

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.starts_early = False  # terms are counted on the host

    def build_stages(self, trained: bool) -> tuple[list[LocalStage], RankParameters]:
        own, train = load_own_model(self.config.model.module), self.config.train
        self.stage = build_own_stage(own, self.sync_mesh, self.policy, train.seed)
        return [self.stage], RankParameters([self.stage.parameters])

    def initialise(self) -> None:
        self.stage.fill(self.stage.own.build(self.config.train.seed))

    def count_tokens(self, batches: Sequence[Batch], updates: Sequence[int], replicas: Group | None) -> list[int]:
        """Return 1 for each update: the loss is not divided before its backward. Begins a step."""
        self.stage.counted.zero_()
        self.stage.statistics.begin()
        return [1] * (max(updates) + 1)

    def update(self, step: int, tokens: int, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        terms = self._terms()
        self.gradient_terms = max(1.0, terms)
        result = super().update(step, round(terms), rate, stop, action, loss)
        if result.skipped:
            self.stage.statistics.cancel()
        else:
            self.stage.statistics.end(self.mesh)
        return result

    def _terms(self) -> float:
        return float(to_host(all_reduce(self.stage.counted.clone(), self.mesh.group("dp"))))

    def evaluate(self, samples: Dataset) -> float:
        """Return the loss per term of the first `validation_sequences` samples."""
        layout = self.config.parallel
        n, per_pass = layout.micro_batch, layout.micro_batch * layout.dp
        passes = self.validation_sequences // per_pass
        first = [m * per_pass + self.mesh.index("dp") * n for m in range(passes)]
        batches = [samples.batch(range(start, start + n)).to(self.mesh.device) for start in first]
        self.stage.counted.zero_()
        loss = self.build_runtime(build_forwards(self.program, passes)).evaluate(batches)
        return float(to_host(all_reduce(loss, self.mesh.group("world")))) / max(1.0, self._terms())

    def state(self) -> dict[str, list[Piece]]:
        """Return all tensors that a checkpoint stores: also buffers and frozen parameters."""
        return super().state() | {f"model.{name}": pieces for name, pieces in self._kept().items()}

    def _kept(self) -> dict[str, list[Piece]]:
        return self.stage.state(self.mesh.rank)

    def _move(self, batches: Sequence[Any], sequences: float) -> list[Any]:
        return [batch.to(self.mesh.device) for batch in batches]
