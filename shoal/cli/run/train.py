"""`shoal train`."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

import shoal
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class TrainOptions(Section):
    ranks: PositiveInt | None = None
    """Processes to start here (default: as many as the layout has); must equal pp x dp x tp."""

    run_folder: Path | None = None
    """Where checkpoints and metrics go (default: a new folder under runs/)."""

    resume: Path | None = None
    """Go on from the newest checkpoint of this run folder, on any layout. Without a value: --run-folder, or the newest
    run under runs/. The run's own config is the default for every option."""

    keep_going: bool = False
    """Begin the run of --run-folder, or go on with it if it has begun: for jobs that are started again (Kubernetes). So
    do jobs that torchrun --max-restarts or SLURM's requeue start again."""

    profile: bool = False
    """The same as --metrics.profile: record some steps action by action, for `shoal report`."""


def run(options: TrainOptions, config: RunConfig) -> int:
    """Train; the exit code is that of the run."""
    if options.profile:
        config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"profile": True})})
    return shoal.train(
        config, ranks=options.ranks, run_folder=options.run_folder, resume=options.resume,
        keep_going=options.keep_going,
    )
