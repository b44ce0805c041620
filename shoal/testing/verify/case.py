"""One verification, from a run's config to a verdict: the runs on both sides, and the search for the place."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.engine.data.tokenizer import load_tokenizer
from shoal.launch.worker_pool import Pool, RankError
from shoal.pipeline.check_run import check_run
from shoal.pipeline.from_layout import find_schedule, virtual_stages
from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.number_formats import verified_as
from shoal.testing.verify.compare import PLAIN, Finding, Verdict, judge
from shoal.testing.verify.rank import ComparisonJob, RankReport, compare, synthetic
from shoal.testing.verify.reference import StepFacts, run_reference

_PLAIN_RATE = 0.1  # large enough that a wrong gradient shows in the weights of the next step


@dataclass(frozen=True)
class Case:
    """What will be compared.

    Attributes:
        config: the run, as it will be run here.
        shape: its model.
        notes: in words, what differs from the run that was given.
    """

    config: RunConfig
    shape: ModelShape
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        """Accumulated by each replica in one step."""
        return self.config.parallel.microbatches(self.config.train.global_batch)


def prepare(config: RunConfig, *, own_precision: bool, accumulate: bool = True) -> Case:
    """Make a run comparable: float64, synthetic data, more than one micro-batch.

    Args:
        own_precision: keep the run's precision.
        accumulate: double the global batch of a run that accumulates nothing, since that hides faults.

    Raises:
        UsageError: the layout does not fit the model or the batch.
    """
    shape = config.model.shape(
        vocab=load_tokenizer(config.data.tokenizer).vocab_size, sequence_length=config.data.sequence_length
    )
    train, notes = config.train, []
    check_run(config, shape)
    changed: dict = {"device": "cpu", "compile": False}
    if train.compile:
        notes.append("compile is off: the layout is verified, not the compiler")
    if not own_precision:
        changed["precision"] = verified_as(train.precision)
    if accumulate and config.parallel.microbatches(train.global_batch) == 1:
        schedule, virtual = find_schedule(config.parallel), virtual_stages(config.parallel)
        if reason := schedule.refuses(config.parallel.pp, 2, virtual):
            notes.append(f"faults of accumulation stay unseen, which need two micro-batches: {reason}")
        else:
            doubled = changed["global_batch"] = 2 * train.global_batch
            notes.append(f"global batch doubled to {doubled}: faults of accumulation need two micro-batches")
    config = config.model_copy(update={"train": train.model_copy(update=changed)})
    return Case(config, shape, tuple(notes))


def run_case(case: Case, pool: Pool, *, steps: int, plant: str = "") -> tuple[Verdict, dict[str, list[StepFacts]]]:
    """Run both sides, compare, and look for the first place that differs if one does.

    Args:
        plant: a fault to plant on the ranks, or "".

    Returns:
        The verdict, and what one device computed, by rule.
    """
    with TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        start = time.monotonic()
        samples = synthetic(case.config, case.shape)
        rules = {PLAIN: _with_optimizer(case.config, _plain(case.config.optimizer))}
        facts = {
            PLAIN: run_reference(rules[PLAIN], case.shape, samples, rule=PLAIN, steps=steps, folder=folder)
        }
        own = _clipping(case.config, facts[PLAIN][0].gradient_norm)
        rules[own.optimizer.name] = own
        facts[own.optimizer.name] = run_reference(
            own, case.shape, samples, rule=own.optimizer.name, steps=steps, folder=folder
        )
        # The ranks share this machine's cores, so they take a multiple of what one device took.
        timeout = 120 + 30 * (time.monotonic() - start)
        job = ComparisonJob(rules, case.shape, steps, folder, plant)
        verdict = _judged(job, case, pool, facts, timeout)
        if verdict.findings and verdict.findings[0].step >= 0:
            verdict.findings = _located(verdict.findings, job, case, pool, timeout) + verdict.findings
        return verdict, facts


def _judged(
    job: ComparisonJob, case: Case, pool: Pool, facts: dict[str, list[StepFacts]], timeout: float
) -> Verdict:
    layout = case.config.parallel
    try:
        reports: list[RankReport] = pool.run(compare, layout.world_size, job, timeout=timeout)
    except RankError as error:
        rank, cause = error.failures[0]
        text = f"rank {rank}, which failed: {error.reason}\n{cause}"
        finding = Finding(-1, "", "failure", "", float("inf"), (f"rank {rank}",), text)
        return Verdict(findings=[finding])
    return judge(layout, case.shape.layers, case.config.train.precision, facts, reports)


def _located(findings: list[Finding], job: ComparisonJob, case: Case, pool: Pool, timeout: float) -> list[Finding]:
    """Run the first step that differs once more, watching every module: what differs there in forward or backward."""
    first = findings[0]
    config = job.rules[first.rule]
    steps = first.step + 1
    samples = synthetic(config, case.shape)
    facts = run_reference(
        config, case.shape, samples, rule=first.rule, steps=steps, folder=job.folder, trace=True
    )
    traced = replace(job, rules={first.rule: config}, steps=steps, trace=True)
    verdict = _judged(traced, case, pool, {first.rule: facts}, timeout)
    return verdict.findings[:1]


def _with_optimizer(config: RunConfig, optimizer: OptimizerConfig) -> RunConfig:
    return config.model_copy(update={"optimizer": optimizer})


def _plain(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The rule that hides nothing: a step is the gradient."""
    return OptimizerConfig(
        name="sgd",
        learning_rate=_PLAIN_RATE,
        weight_decay=optimizer.weight_decay,
        clip_norm=0.0,
        schedule="constant",
        warmup_steps=0,
    )


def _clipping(config: RunConfig, norm: float) -> RunConfig:
    """The run with its own rule, whose clipping is made to act if it has one."""
    clip = min(config.optimizer.clip_norm, norm / 2)
    return _with_optimizer(config, config.optimizer.model_copy(update={"clip_norm": clip}))
