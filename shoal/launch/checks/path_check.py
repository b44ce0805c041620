"""Whether the folders that a run will write into can be written, have room and are its own, before any is made.

Nothing is left of the trial, so that the same command may be given again when it is mended.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import try_to_write
from shoal.engine.checkpoint import CheckpointError, list_checkpoints
from shoal.engine.checkpoint.save import check_folder
from shoal.engine.checkpoint.storage import Place
from shoal.launch.checks.memory_check import check_disk, checkpoint_bytes
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUNS, RunConfig
from shoal.training.resilience.host_memory_dir import check_run_dir, run_dir
from shoal.training.run_folder import checkpoints_of, is_free, taken

BESIDE = 64 << 10  # bytes that a run writes beside its checkpoints at the least: config, metrics, events, logs


def check_folders(
    config: RunConfig, shape: ModelShape, folder: Path | None, *, resume: bool, ranks: Sequence[int]
) -> None:
    """Refuse a run that could not write what it must.

    Args:
        folder: of the run; None is one that will be made under ``runs/``.
        resume: the run is there already, and its checkpoints are its own.
        ranks: those of this machine, of which one calls this. What is the run's as a whole, rank 0's machine looks at.

    Raises:
        UsageError: naming the folder, what is wrong with it, and the option that names another.
    """
    there = folder or RUNS
    if 0 in ranks:
        _check_run_folder(folder, fresh=not resume)
        _check_checkpoints(config, shape, checkpoints_of(config, there), fresh=not resume)
    if config.failover.memory_every:
        check_run_dir(run_dir(there, config.failover), _remembered(config, shape, ranks))


def _check_run_folder(folder: Path | None, *, fresh: bool) -> None:
    try:
        if fresh and folder is not None and not is_free(folder):
            raise taken(folder)
        try_to_write(folder or RUNS, BESIDE)
    except OSError as error:
        mend = "Make room, or name" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Name"
        raise UsageError(
            f"--run-folder {folder or RUNS} cannot be written: {error.strerror}.\n  {mend} a folder that can."
        ) from None


def _check_checkpoints(config: RunConfig, shape: ModelShape, kept: Place, *, fresh: bool) -> None:
    try:
        check_folder(kept, fresh=fresh)
    except CheckpointError:
        raise
    except Exception as error:  # the libraries of object stores each have their own
        raise CheckpointError(
            f"checkpoint.folder = '{kept}' cannot be reached: {type(error).__name__}: {error}"
            "\n  Name a folder that can, or leave it out."
        ) from None
    if isinstance(kept, Path):
        check_disk(config, shape, kept, existing=len(list_checkpoints(kept)))


def _remembered(config: RunConfig, shape: ModelShape, ranks: Sequence[int]) -> int:
    """Bytes of the states that this machine keeps in memory at least: two copies of all of it, and two for nodes' next
    ones. Of several machines each has a part that its ranks know, who ask for it once more."""
    if len(ranks) < config.parallel.world_size:
        return 0
    nodes = 0 < config.failover.node_ranks < len(ranks)
    return (4 if nodes else 2) * checkpoint_bytes(config, shape)
