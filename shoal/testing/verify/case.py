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
from shoal.testing.verify.rank import RankReport, compare
from shoal.testing.verify.reference import ComparisonJob, StepFacts, run_reference

_PLAIN_RATE = 0.1  # large enough that a wrong gradient shows in the weights of the next step


@dataclass(frozen=True)
class Case:
    """A run made ready for comparison.

    Attributes:
        config: the run, as it is compared.
        shape: its model.
        notes: in words, how it differs from the given run.
    """

    config: RunConfig
    shape: ModelShape
    notes: tuple[str, ...] = ()


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
    """Run both sides, compare them, and locate the first difference if there is one.

    Args:
        plant: a fault to plant on the ranks, or "".

    Returns:
        The verdict, and what one device computed, by rule.
    """
    with TemporaryDirectory(prefix="shoal-verify-") as folder:
        start = time.monotonic()
        rules = {PLAIN: _with_optimizer(case.config, _plain(case.config.optimizer))}
        job = ComparisonJob(rules, case.shape, steps, Path(folder), plant)
        facts = {PLAIN: run_reference(job, PLAIN)}
        own = _clipping(case.config, facts[PLAIN][0].gradient_norm)
        rules[own.optimizer.name] = own
        facts[own.optimizer.name] = run_reference(job, own.optimizer.name)
        # The ranks share this machine's cores, so they take a multiple of what one device took.
        timeout = 120 + 30 * (time.monotonic() - start)
        verdict = _judged(job, pool, facts, timeout)
        if verdict.findings and (first := verdict.findings[0]).step >= 0:
            # Once more up to the first step that differs, watching every module: what differs there comes first.
            traced = replace(job, rules={first.rule: rules[first.rule]}, steps=first.step + 1, trace=True)
            watched = {first.rule: run_reference(traced, first.rule)}
            verdict.findings = _judged(traced, pool, watched, timeout).findings[:1] + verdict.findings
        return verdict, facts


def _judged(job: ComparisonJob, pool: Pool, facts: dict[str, list[StepFacts]], timeout: float) -> Verdict:
    config = next(iter(job.rules.values()))
    try:
        reports: list[RankReport] = pool.run(compare, config.parallel.world_size, job, timeout=timeout)
    except RankError as error:
        rank, cause = error.failures[0]
        text = f"rank {rank}, which failed: {error.reason}\n{cause}"
        return Verdict(findings=[Finding(-1, "", "failure", "", float("inf"), (f"rank {rank}",), text)])
    return judge(config.parallel, job.shape.layers, config.train.precision, facts, reports)


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
