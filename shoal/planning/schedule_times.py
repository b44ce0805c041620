"""Simulate schedules with estimated times of a model on a cluster (including this machine, once calibrated)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.base.section import validate
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.simulator.compare import PlayedSchedule, check_arguments, schedule_names
from shoal.pipeline.simulator.engine import Disturbance, check_size, simulate
from shoal.planning.describe import describe_run
from shoal.planning.estimable import check_estimable, check_names
from shoal.planning.estimate import Estimate
from shoal.spec.layout import Layout


def compare_schedules_on_cluster(
    schedules: str | Sequence[str], cluster: str, *, model: str | None = None, pp: int = 4, microbatches: int = 8,
    virtual_stages: int | None = None, dp: int = 1, tp: int = 1, micro_batch: int = 1,
    sequence_length: int | None = None, precision: str = "bf16", blocking: bool = False,
    stragglers: Mapping[int, float] | None = None, slow_links: Mapping[tuple[int, int], float] | None = None,
    jitter: float = 0.0, seed: int = 0,
) -> list[PlayedSchedule]:  # fmt: skip
    """Simulate one step of several pipeline schedules with the times of `shoal.estimate`, in seconds.

    Args:
        schedules: a name as in a layout, or several; hyphens, underscores and case are ignored.
        cluster: cluster of pp x dp x tp accelerators.
        model: catalog name (default: llama-3-8b).
        pp: pipeline ranks.
        microbatches: micro-batches per step.
        virtual_stages: stages per rank, for schedules that leave it open.
        dp: replicas of the pipeline.
        tp: tensor-parallel ranks of each pipeline rank.
        micro_batch: sequences per micro-batch.
        sequence_length: tokens per sequence (default: the model's maximum training length).
        precision: precision, see ``train.precision``.
        blocking, stragglers, slow_links, jitter, seed: as in `shoal.compare_schedules`.

    Raises:
        UsageError: an unknown schedule, model, cluster or precision, or an invalid layout.

    >>> import shoal
    >>> few, many = (
    ...     shoal.compare_schedules_on_cluster(["1f1b"], "2xH100", model="tiny", pp=2, microbatches=m)[0]
    ...     for m in (4, 16)
    ... )
    >>> few.timeline.bubble > many.timeline.bubble
    True
    """
    names = schedule_names(schedules)
    check_arguments(names, virtual_stages=virtual_stages)
    check_names(precision, "adamw")
    disturbance = Disturbance(stragglers or {}, slow_links or {}, jitter, seed)
    check_size(pp, microbatches, dp, disturbance, virtual_stages or 1)
    estimates = []
    for name in names:
        fields = {
            "pp": pp, "dp": dp, "tp": tp, "schedule": name, "micro_batch": micro_batch,
            "virtual_stages": None if name in EVERY and EVERY[name].virtual else virtual_stages,
        }  # fmt: skip
        run = describe_run(
            validate(Layout, fields, source="command line"), model=model, cluster=cluster, precision=precision,
            sequence_length=sequence_length, global_batch=dp * micro_batch * microbatches, fill=False,
        )  # fmt: skip
        check_estimable(run)
        estimates.append(Estimate(run))
    played = []
    for name, estimate in zip(names, estimates, strict=True):
        links = replace(estimate.link, blocking=blocking)
        timeline = simulate(estimate.columns, estimate.durations, links, disturbance=disturbance, dp=dp, tp=tp)
        played.append(PlayedSchedule(name, timeline, estimated_seconds=estimate.step_seconds))
    return played
