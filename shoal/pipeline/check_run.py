"""Validation of a run from its config and model alone."""

from __future__ import annotations

from shoal.pipeline.from_layout import build_layout_program, check_schedule, splits_backward
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.check import check_compatibility
from shoal.spec.compatibility.features import Run
from shoal.spec.compatibility.sizes import check_float8_sizes, check_relaxed_sizes
from shoal.spec.compatibility.unread import check_unread
from shoal.spec.config import RunConfig
from shoal.spec.layout.sizes import check_layout
from shoal.spec.schedules import ASYNCHRONOUS


def check_run(config: RunConfig, shape: ModelShape, *, ranks: int | None = None) -> None:
    """Validate a run's config against its model; used by `shoal train`, `estimate`, `plan` and `verify`.

    Args:
        shape: the config's model.
        ranks: number of processes, if already fixed (torchrun, SLURM, ``--ranks``).

    Raises:
        UsageError: the message names the field, its value, the reason and the nearest remedy.
    """
    layout, batch, length = config.parallel, config.train.global_batch, config.data.sequence_length
    check_layout(layout, shape, global_batch=batch, sequence_length=length, ranks=ranks)
    check_schedule(layout, shape, batch, sequence_length=length)
    check_compatibility(_with_program(config, shape, layout.microbatches(batch)))
    check_float8_sizes(config, shape)
    check_relaxed_sizes(config)
    check_unread(config)


def _with_program(config: RunConfig, shape: ModelShape, microbatches: int) -> Run:
    """Return the run with data from its pipeline program, which is built only if a rule needs it."""
    layout = config.parallel
    if config.train.compile:
        return Run(config, shape, splits_backward=splits_backward(build_layout_program(layout, microbatches)))
    if layout.schedule in ASYNCHRONOUS and config.optimizer.clip_norm:
        return Run(config, shape, updates=build_layout_program(layout, microbatches).updates)
    return Run(config, shape)
