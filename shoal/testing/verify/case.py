"""One verification, from a run's config to a verdict: the runs on both sides, and the location of a difference."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.engine.data.tokenizer import build_shape
from shoal.launch.worker_pool import Pool, RankError
from shoal.pipeline.from_layout import check_run, find_schedule, virtual_stages
from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.number_formats import verified_as
from shoal.testing.verify.compare import PLAIN, Mismatch, Verdict, judge
from shoal.testing.verify.rank import RankReport, compare
from shoal.testing.verify.reference import ComparisonJob, StepFacts, run_reference

_PLAIN_RATE = 0.1  # large enough that a wrong gradient shows in the weights of the next step


@dataclass(frozen=True)
class Case:
    """A run as it is compared."""

    config: RunConfig
    shape: ModelShape
    notes: tuple[str, ...] = ()  # how it differs from the given run


def prepare(config: RunConfig, *, own_precision: bool, accumulate: bool = True, device: str = "cpu") -> Case:
    """Make a run comparable: float64 unless ``own_precision``, synthetic data, and two micro-batches if ``accumulate``.

    Args:
        device: "cpu" or "cuda": where the ranks compute. It must be that of the pool.

    Raises:
        UsageError: the layout does not fit the model or the batch.
    """
    shape = build_shape(config)
    train, notes = config.train, []
    check_run(config, shape)
    changed: dict = {"device": device, "compile": False}
    if train.compile:
        notes.append("compile is off: the layout is verified, not the compiler")
    if not own_precision:
        changed["precision"] = verified_as(train.precision)
    if accumulate and config.parallel.microbatches(train.global_batch) == 1:
        schedule, virtual = find_schedule(config.parallel), virtual_stages(config.parallel)
        if reason := schedule.refuses(config.parallel.pp, 2, virtual):
            notes.append(f"faults of accumulation are not detected, which needs two micro-batches: {reason}")
        else:
            doubled = changed["global_batch"] = 2 * train.global_batch
            notes.append(f"global batch doubled to {doubled}: detecting faults of accumulation needs two micro-batches")
    return Case(config.replace(train=changed), shape, tuple(notes))


def run_case(
    case: Case, pool: Pool, *, steps: int, inject: str = "", transport: str = ""
) -> tuple[Verdict, dict[str, list[StepFacts]]]:
    """Run both sides and locate the first difference, if any; return the verdict and one device's results by rule.

    Args:
        transport: of the ranks' mesh; "" takes that of `choose_transport`.
    """
    with TemporaryDirectory(prefix="shoal-verify-") as folder:
        start = time.monotonic()
        rules = {PLAIN: _with_plain_rule(case.config)}
        job = ComparisonJob(rules, case.shape, steps, Path(folder), inject, transport)
        facts = {PLAIN: run_reference(job, PLAIN)}
        own = case.config.optimizer
        clip = {"clip_norm": min(own.clip_norm, facts[PLAIN][0].gradient_norm / 2)}  # clipping, if any, takes effect
        rules[own.name] = case.config.replace(optimizer=clip)
        facts[own.name] = run_reference(job, own.name)
        # The ranks share this machine's cores, so they take a multiple of one device's time. On CUDA they may compile.
        timeout = (120 if pool.device == "cpu" else 600) + 30 * (time.monotonic() - start)
        verdict = _compare(job, pool, facts, timeout)
        if verdict.findings and (first := verdict.findings[0]).step >= 0:
            # Run again up to the first step that differs, tracing every module. The traced difference comes first.
            traced = replace(job, rules={first.rule: rules[first.rule]}, steps=first.step + 1, trace=True)
            watched = {first.rule: run_reference(traced, first.rule)}
            verdict.findings = _compare(traced, pool, watched, timeout).findings[:1] + verdict.findings
        return verdict, facts


def _compare(job: ComparisonJob, pool: Pool, facts: dict[str, list[StepFacts]], timeout: float) -> Verdict:
    config = next(iter(job.rules.values()))
    try:
        reports: list[RankReport] = pool.run(compare, config.parallel.world_size, job, timeout=timeout)
    except RankError as error:
        rank, cause = error.failures[0]
        text = f"rank {rank}, which failed: {error.reason}\n{cause}"
        return Verdict(findings=[Mismatch(-1, "", "failure", "", float("inf"), (f"rank {rank}",), text)])
    return judge(config.parallel, job.shape.layers, config.train.precision, facts, reports)


def _with_plain_rule(config: RunConfig) -> RunConfig:
    """Return the run with plain SGD, which hides nothing: an update is the gradient."""
    plain = OptimizerConfig(
        name="sgd", learning_rate=_PLAIN_RATE, weight_decay=config.optimizer.weight_decay, clip_norm=0.0,
        schedule="constant", warmup_steps=0,
    )
    return config.replace(optimizer=plain)
