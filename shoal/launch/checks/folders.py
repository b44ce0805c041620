"""Check, before anything is created, that this machine has the disks and folders that a run writes.

A check creates nothing, so the same command can be repeated after a correction.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.base.addresses import AnyPath
from shoal.base.errors import UsageError
from shoal.base.files import nearest_existing, try_to_write
from shoal.base.units import show_bytes
from shoal.engine.checkpoint import CheckpointError, list_checkpoints
from shoal.engine.checkpoint.save import check_folder
from shoal.engine.own.definition import OwnShape
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUNS, RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.training.resilience.host_memory_dir import check_run_dir, run_dir
from shoal.training.run_folder import get_checkpoint_folder, is_free, reject_links, taken

BESIDE = 64 << 10  # minimum bytes that a run writes besides its checkpoints: config, metrics, events, logs

# ---- folders ---------------------------------------------------------------------------------------------------------


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
    if 0 in ranks:
        _check_run_folder(folder, fresh=not resume)
        _check_checkpoints(config, shape, get_checkpoint_folder(config, folder or RUNS), fresh=not resume)
    if config.failover.memory_every:
        needed: int | None = 0  # unknown for a run on several machines, whose ranks check their own parts later
        if len(ranks) == config.parallel.world_size:
            # Two copies, and two more of the neighbours' states if this machine simulates several nodes.
            copies = 4 if 0 < config.failover.node_ranks < len(ranks) else 2
            needed = copies * checkpoint_bytes(config, shape)
        check_run_dir(run_dir(folder or RUNS, config.failover), None if resume else needed)


def _check_run_folder(folder: Path | None, *, fresh: bool) -> None:
    try:
        if fresh and folder is not None and not is_free(folder):
            raise taken(folder)
        if folder is not None:
            reject_links(folder)
        try_to_write(folder or RUNS, BESIDE)
    except OSError as error:
        mend = "Free space, or name" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Name"
        raise UsageError(
            f"--run-folder {folder or RUNS} cannot be written: {error.strerror}.\n  {mend} a writable folder."
        ) from None


def _check_checkpoints(config: RunConfig, shape: ModelShape, kept: AnyPath, *, fresh: bool) -> None:
    try:
        check_folder(kept, fresh=fresh)
    except CheckpointError:
        raise
    except Exception as error:  # each object-store library has its own exceptions
        raise CheckpointError(
            f"checkpoint.folder = '{kept}' cannot be reached: {type(error).__name__}: {error}"
            "\n  Name a reachable folder, or leave it out."
        ) from None
    if isinstance(kept, Path):
        check_disk(config, shape, kept, existing=len(list_checkpoints(kept)))


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    if isinstance(shape, OwnShape):  # with two moments, as most optimizers have
        return 3 * shape.parameters() * FORMATS[config.train.precision].storage.itemsize
    policy, all_layers = FORMATS[config.train.precision], [StagePart(range(shape.layers))]
    states = state_bytes(shape, Layout(), policy, config.optimizer.name, all_layers).optimizer
    return shape.parameters() * policy.storage.itemsize + states


def most_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints a run has at once: a new one is written before the oldest is removed."""
    every = config.checkpoint.every
    return min(config.checkpoint.keep + 1, 1 + (config.train.steps - 1) // every if every else 1)


def check_disk(config: RunConfig, shape: ModelShape, folder: Path, existing: int = 0) -> None:
    """Reject a run whose checkpoints do not fit on the disk of ``folder``, which has ``existing`` ones already."""
    each = checkpoint_bytes(config, shape)
    most = most_checkpoints(config) - existing
    disk = nearest_existing(folder)
    size, _, free = shutil.disk_usage(disk)
    if size and most * each > free:  # size 0: not a disk; writing to it reports the error
        raise UsageError(
            f"checkpoints: {most} of {show_bytes(each)} = {show_bytes(most * each)} are kept together, but {disk} has "
            f"{show_bytes(free)} free.\n  Free space, name a folder on another disk, or set checkpoint.keep lower."
        )
