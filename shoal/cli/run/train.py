"""`shoal train`: train a model."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

import shoal
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class TrainOptions(Section):
    ranks: PositiveInt | None = None
    """Processes to start on this machine (default: the layout's number of ranks); must equal pp x
    dp x cp x tp."""

    run_folder: Path | None = None
    """Folder of checkpoints and metrics (default: a new folder under runs/)."""

    resume: Path | None = None
    """Resume from the newest checkpoint of this run folder, on any layout. Without a value: --run-folder, or the
    newest run under runs/. The run's own config is the default for every option."""

    auto_resume: bool = False
    """Start the run of --run-folder, or resume it if it already exists: for jobs that are restarted (Kubernetes). Jobs
    restarted by torchrun --max-restarts or SLURM's requeue do this automatically."""

    profile: bool = False
    """Same as --metrics.profile: record some steps action by action, for `shoal report`."""


def run(options: TrainOptions, config: RunConfig) -> int:
    """Train; return the exit code of the run."""
    if options.profile:
        config = config.replace(metrics={"profile": True})
    return shoal.train(config, **options.model_dump(exclude={"profile"}))
