"""Check that a run's folders are writable, have enough space and belong to no other run, before any is created.

The check leaves nothing behind, so the same command can be repeated after a correction.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import try_to_write
from shoal.engine.checkpoint import CheckpointError, list_checkpoints
from shoal.engine.checkpoint.save import check_folder
from shoal.engine.checkpoint.storage import AnyPath
from shoal.launch.checks.memory_check import check_disk, checkpoint_bytes
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUNS, RunConfig
from shoal.training.resilience.host_memory_dir import check_run_dir, run_dir
from shoal.training.run_folder import checkpoints_of, is_free, taken

BESIDE = 64 << 10  # minimum bytes that a run writes besides its checkpoints: config, metrics, events, logs


def check_folders(
    config: RunConfig, shape: ModelShape, folder: Path | None, *, resume: bool, ranks: Sequence[int]
) -> None:
    """Reject a run that could not write its files.

    Args:
        folder: run folder; None for a new one under ``runs/``.
        resume: whether the run exists, so that its folder and checkpoints are its own.
        ranks: ranks on this machine, one of which calls this. Rank 0's machine checks what the run shares.

    Raises:
        UsageError: the message names the folder, the problem, and the option that selects another folder.
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


def _check_checkpoints(config: RunConfig, shape: ModelShape, kept: AnyPath, *, fresh: bool) -> None:
    try:
        check_folder(kept, fresh=fresh)
    except CheckpointError:
        raise
    except Exception as error:  # each object-store library has its own exceptions
        raise CheckpointError(
            f"checkpoint.folder = '{kept}' cannot be reached: {type(error).__name__}: {error}"
            "\n  Name a folder that can, or leave it out."
        ) from None
    if isinstance(kept, Path):
        check_disk(config, shape, kept, existing=len(list_checkpoints(kept)))


def _remembered(config: RunConfig, shape: ModelShape, ranks: Sequence[int]) -> int:
    """Return the minimum bytes of states that this machine keeps in memory.

    These are two copies of the states, and two more of the neighbours' if this machine simulates several nodes. Returns
    0 for a run on several machines, whose ranks check their own parts later.
    """
    if len(ranks) < config.parallel.world_size:
        return 0
    nodes = 0 < config.failover.node_ranks < len(ranks)
    return (4 if nodes else 2) * checkpoint_bytes(config, shape)
