"""Engine of a model of one's own: data parallelism, ZeRO and everything around a step, for any module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

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
from shoal.engine.own.chain import Chain, find_chain
from shoal.engine.own.definition import SUM_AND_TERMS, load_own_model
from shoal.engine.own.optimizer import OwnRule
from shoal.engine.own.runtime import OwnRuntime
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.stage import ALL_METRICS, OwnStage, build_own_stage, show_names
from shoal.engine.own.tensor.draws import find_parts
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.user_code import explained
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.runtime import Runtime
from shoal.pipeline.from_layout import build_forwards, splits_backward
from shoal.pipeline.program import Action, Program
from shoal.spec.config import RunConfig
from shoal.training.records.metrics import StepMetrics
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import StageUpdates, StepResult

Found = TypeVar("Found")


class OwnUpdates(StageUpdates):
    """Updates of a stage in a step of an asynchronous pipeline, whose gradients come with the number of terms."""

    engine: OwnEngine

    def divide(self, action: Action) -> None:
        engine, runtime = self.engine, self.engine.runtime
        assert isinstance(runtime, OwnRuntime), "a pipeline has several stages"
        updates = engine.program.update_by_microbatch.items()
        terms = torch.stack([runtime.terms[action.stage, m] for m, update in updates if update == action.version - 1])
        engine.parameters.scale(1 / (to_host(all_reduce(terms.sum(), engine.mesh.group("dp"))) or 1.0))

    def result(self, loss: Tensor, tokens: float, rate: float, *, stop: bool) -> StepResult:
        result = super().result(loss, self.engine.count_terms(self.step, loss), rate, stop=stop)
        self.engine.end_statistics()
        return result


class OwnEngine(Engine):
    """Training engine of one rank for the definition that ``model.module`` names.

    The number of terms of a loss is known only after its forward. So backward gives the gradients of the sum, which
    are divided before the update.

    Attributes:
        divisor: that of the loss before its backward, see `count_tokens`.
        metrics: means of the definition's metrics in the last step.
    """

    stages: list[OwnStage]  # type: ignore[assignment]
    stage_updates = OwnUpdates

    def __init__(self, *arguments: Any, **options: Any):
        config: RunConfig = arguments[0]
        self.own = load_own_model(config.model.module)
        self.chain: Chain | None = None
        super().__init__(*arguments, **options)
        self.starts_early = False  # terms are counted on the host
        self.divisor = 1
        self.metrics: dict[str, float] = {}

    def build_stages(self, trained: bool) -> tuple[list[LocalStage], RankParameters]:
        own, seed, mesh, program = self.own, self.config.train.seed, self.sync_mesh, self.program
        split = SplitRanks.alone(mesh.layout) is not None
        draws = self.explore(lambda batch: find_parts(own, mesh.layout, batch)) if split else {}
        if program.depth == 1:
            stage = build_own_stage(own, mesh, self.policy, seed, draws)
            return [stage], RankParameters([stage.parameters])
        self.chain = chain = self.explore(lambda batch: find_chain(own, self.policy, seed, batch))
        parts = chain.assign(program, sequence_parallel=mesh.layout.sequence_parallel)
        shared, holders = chain.find_shared(parts)
        ranks = ",".join(map(str, sorted({program.stage_rank[stage] for stage in holders})))
        # Group creation is collective: every rank creates these groups at the same point.
        ends = mesh.group(f"pp:{ranks}", purpose="ends") if shared else None
        stages = [
            build_own_stage(
                own, mesh, self.policy, seed, draws, chain, parts[i], i, shared, holders,
                splits=splits_backward(program),
            )
            for i in program.rank_stages(mesh.index("pp"))
        ]
        return list(stages), RankParameters([stage.parameters for stage in stages], ends)

    def explore(self, look: Callable[[OwnBatch], Found]) -> Found:
        """Return what a function finds by running the module on the first micro-batch."""
        samples = OwnDataset(self.own, "train", self.config.train.seed)
        return look(samples.batch(range(self.config.parallel.micro_batch)))

    def build_runtime(self, program: Program) -> Runtime:
        if self.chain is None:
            return super().build_runtime(program)
        crossings = [self.chain.crossings[part.start] for part in self.chain.assign(self.program)]
        return OwnRuntime(program, self.stages, self.sync_mesh, crossings)

    def initialise(self) -> None:
        values = self.own.build(self.config.train.seed)
        for stage in self.stages:
            stage.fill(values)

    def describe_module(self) -> nn.Module:
        return self.own.build_empty()

    def build_optimizer(self, shards: Shards) -> Rule:
        make = self.own.make_optimizer
        return OwnRule(self.config.optimizer, shards, make) if make else super().build_optimizer(shards)

    def learning_rate(self, step: int) -> float:
        schedule, steps = self.own.schedule, self.config.train.steps
        if schedule is None:
            return super().learning_rate(step)
        with explained("its schedule()"):
            rate = float(schedule(step, steps))
        if not 0 <= rate < math.inf:
            raise UsageError(f"model.module: its schedule() returns {rate} for step {step} of {steps}.\n  Return a "
                             "learning rate from 0.")
        return rate

    def logged(self, metrics: StepMetrics) -> None:
        own = self.own
        if own.on_step:
            with explained("its on_step()"):
                own.on_step(metrics)
        if own.on_validation and metrics.validation_loss is not None:
            with explained("its on_validation()"):
                own.on_validation(metrics)

    def saved(self, step: int, folder: AnyPath) -> None:
        if self.own.on_save:
            with explained("its on_save()"):
                self.own.on_save(step, folder)

    def step_metrics(self) -> dict[str, Any]:
        return {"metrics": self.metrics or None}

    def prefetches(self) -> bool:
        return super().prefetches() and not self.samples.draws  # type: ignore[attr-defined]

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        try:
            with explained("the backward of its loss", only_its_own=True):
                return super().step(step, stop=stop, dry=dry)
        finally:  # buffers of a step that failed, was skipped or dry are those before it
            for stage in self.stages:
                stage.statistics.cancel()

    def count_tokens(self, batches: Sequence[Batch], updates: Sequence[int], replicas: Group | None) -> list[int]:
        """Begin a step; return for each update by what the loss is divided before its backward.

        That is 1, or with loss scaling a power of two near the terms of the step before, for the range of float16.
        """
        self._begin()
        return [self.divisor] * (max(updates) + 1)

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        terms = self.count_terms(step, loss)
        self.gradient_terms = (terms or 1.0) / self.divisor
        if self.loss_scale:
            self.divisor = 1 << max(0, math.frexp(terms)[1])
        result = super().update(step, terms, rate, stop, loss)
        if not result.skipped:
            self.end_statistics()
        return result

    def count_terms(self, step: int, loss: Tensor) -> float:
        """Return the terms of a step, and note its metrics. Collective.

        Raises:
            UsageError: they are none, with a loss, or fewer.
        """
        terms, self.metrics = self._totals(self.loss_replicas)
        if not (terms > 0 or terms == float(loss) == 0):
            raise UsageError(f"model.module: the terms of its loss() in step {step} are {terms:g}, with a loss of "
                             f"{float(loss):g} on this rank.\n  {SUM_AND_TERMS}")
        return terms

    def end_statistics(self) -> None:
        """End a step for the buffers. Collective."""
        for stage in self.stages:
            stage.statistics.end(self.loss_replicas)

    def _begin(self) -> None:
        for stage in self.stages:
            stage.begin()

    def _totals(self, replicas: Group | None) -> tuple[float, dict[str, float]]:
        """Return the terms of the losses and the means of the metrics with terms, over replicas. Collective.

        Raises:
            UsageError: replicas have metrics of other names.
        """
        stage = self.stages[-1]  # if any of this rank computes the loss, the last
        names = stage.names or ()
        digest = crc32("\n".join(names).encode()) >> 12  # so that sums of squares are exact
        same = stage.counted.new_tensor([digest, digest**2])
        terms, total, squares = to_host(self._sum(torch.cat((stage.counted.view(1), same)), replicas))
        ranks = (replicas.size() if replicas else 1) * self.mesh.size("pp")
        if ranks * int(squares) != int(total) ** 2:  # their variance is not 0
            raise UsageError(f"model.module: the metrics of its loss() are {show_names(names)} on this rank, and "
                             f"others on another.\n  {ALL_METRICS}")
        if not names:
            return terms, {}
        none = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        pairs = to_host(self._sum(torch.stack([stage.metrics.get(name, none) for name in names]), replicas))
        return terms, {name: total / number for name, (total, number) in zip(names, pairs, strict=True) if number}

    def _sum(self, x: Tensor, replicas: Group | None) -> Tensor:
        """Sum over replicas and stages. Collective."""
        return all_reduce(all_reduce(x, replicas), self.mesh.group("pp"))

    def evaluate(self, samples: Dataset) -> float:
        """Return the loss per term of the first `validation_sequences` samples; ``validated`` has the metrics.

        Fewer samples are all taken, once; the last pass may repeat the first of them.
        """
        passes = -(-min(self.validation_sequences, samples.samples) // self.per_pass)
        batches = [batch.to(self.mesh.device) for batch in self.read_passes(samples, 0, passes)]
        self._begin()
        loss = self.build_runtime(build_forwards(self.program, passes)).evaluate(batches)
        for stage in self.stages:
            stage.statistics.cancel()  # some modules change buffers in each forward
        replicas = self.mesh.group("dp")
        terms, metrics = self._totals(replicas)
        self.validated = {"metrics": metrics or None}
        return float(to_host(self._sum(loss, replicas))) / (terms or 1.0)

    def weights(self) -> dict[str, list[Piece]]:
        """Return the model's pieces on this rank: parameters, also those that are not trained, and buffers."""
        return super().weights() | {name: pieces for stage in self.stages for name, pieces in stage.state().items()}

    def _move(self, batches: Sequence[Any], sequences: float) -> list[Any]:
        return [batch.to(self.mesh.device) for batch in batches]
