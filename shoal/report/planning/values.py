"""Estimates and plans as plain values, for ``--json``: seconds, bytes and fractions without rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.section import plain
from shoal.planning.estimate import StepEstimate
from shoal.planning.full_training import FullTraining
from shoal.planning.run import EstimatedRun
from shoal.planning.search.plan import Plan

if TYPE_CHECKING:
    from shoal.planning.own_estimate import OwnEstimate  # imports torch


def list_estimate_values(model: str, estimate: StepEstimate, training: FullTraining) -> dict[str, Any]:
    """Return the values of `shoal estimate`."""
    return {
        **_list_run_values(model, estimate.run),
        "microbatches": estimate.run.microbatches,
        **_list_step_values(estimate),
        "training": _list_training_values(training),
    }


def list_own_values(estimate: OwnEstimate) -> dict[str, Any]:
    """Return the values of `shoal estimate` for a model of one's own."""
    config = estimate.config
    return {
        "model": config.model.title, "parameters_per_rank": estimate.counts.parameters,
        "cluster": estimate.cluster.name, "devices": estimate.cluster.size, "precision": config.train.precision,
        "optimizer": config.optimizer.name, "global_batch": config.train.global_batch, "fits": estimate.fits,
        "step_seconds_at_least": estimate.step_seconds,
        "seconds": {
            "products": estimate.compute, "tensor_parallel": estimate.tensor_parallel,
            "data_parallel": estimate.data_parallel, "data_parallel_exposed": estimate.exposed,
        },
        "memory_bytes": {"capacity": estimate.capacity, "parts": estimate.memory},
        "layout": plain(config.parallel),
    }  # fmt: skip


def list_plan_values(
    model: str, plan: Plan, estimates: Sequence[StepEstimate], training: FullTraining | None
) -> dict[str, Any]:
    """Return the values of `shoal plan`, the recommended layout first; no layouts if none fits."""
    layouts = [
        {"role": found.role, **_list_step_values(estimate)}
        for found, estimate in zip(plan.listed, estimates, strict=True)
    ] if estimates else []  # fmt: skip
    nearby = [
        {
            "global_batch": other.run.global_batch, "cluster": other.run.cluster.name,
            "tokens_per_second": other.tokens_per_second, "layout": plain(other.found.layout),
        }
        for other in plan.nearby
    ]  # fmt: skip
    return {
        **_list_run_values(model, plan.run), "layouts": layouts, "nearby": nearby,
        "training": None if training is None else _list_training_values(training),
    }


def _list_run_values(model: str, run: EstimatedRun) -> dict[str, Any]:
    return {
        "model": model, "parameters": run.shape.parameters(), "cluster": run.cluster.name,
        "devices": run.cluster.size, "software": run.software.name, "precision": run.precision,
        "optimizer": run.optimizer, "global_batch": run.global_batch, "sequence_length": run.sequence_length,
    }  # fmt: skip


def _list_step_values(estimate: StepEstimate) -> dict[str, Any]:
    run, step, fullest = estimate.run, estimate.step_seconds, estimate.fullest
    return {
        "fits": estimate.fits,
        "step_seconds": step,
        "step_seconds_80": list(estimate.interval),
        "tokens_per_second": run.tokens / step,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "seconds": dict(estimate.breakdown),
        "memory_bytes": {
            "allocated": fullest.allocated, "reserved": fullest.reserved, "reserved_80": list(estimate.memory_interval),
            "capacity": estimate.capacity, "parts": dict(vars(fullest)),
        },
        "layout": plain(run.layout),
    }  # fmt: skip


def _list_training_values(training: FullTraining) -> dict[str, Any]:
    return {
        "tokens": training.tokens, "days": training.days, "dollars": training.dollars,
        "kilowatt_hours": training.kilowatt_hours, "kilowatts": training.kilowatts,
    }
