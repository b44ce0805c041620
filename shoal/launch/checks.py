"""Check, before anything is created, that a run fits on this machine: memory, disks, and folders that it can write.

A check creates nothing, so the same command can be repeated after a correction. Memory is a lower bound: a
rejected run could not have run. Parts that are not counted (interpreter, allocator fragmentation, gathered layers,
loss, temporaries of the update) may still not fit.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.base.errors import UsageError
from shoal.base.files import nearest_existing, try_to_write
from shoal.base.units import show_bytes
from shoal.engine.checkpoint import CheckpointError, list_checkpoints
from shoal.engine.checkpoint.save import check_folder
from shoal.engine.checkpoint.storage import AnyPath
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.device import host_memory
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.simulator.columns import build_columns
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.planning.cost.parameters import StagePart, rank_parts
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUNS, RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.training.async_dp.memory import count_method_bytes
from shoal.training.resilience.host_memory_dir import check_run_dir, run_dir
from shoal.training.run_folder import get_checkpoint_folder, is_free, taken
from shoal.training.step.engine_state import attention_kernel

BESIDE = 64 << 10  # minimum bytes that a run writes besides its checkpoints: config, metrics, events, logs

# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by kind. Memory shared by the ranks of a host is divided equally among them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    method: int  # of parallel.sync

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        names = {"method": "parallel.sync"}
        return ", ".join(f"{names.get(name, name)} {show_bytes(size)}" for name, size in vars(self).items() if size)


def count_rank_memory(
    config: RunConfig, shape: ModelShape, device: torch.device, *, one_host: bool = False
) -> list[RankMemory]:
    """Return the minimum memory of the first rank of every pipeline stage, at the peak of a step.

    Args:
        one_host: whether all ranks are on this host and share memory where possible.
    """
    layout, policy = config.parallel, FORMATS[config.train.precision]
    program = build_layout_program(layout, layout.microbatches(config.train.global_batch))
    kernel = attention_kernel(config.train.attention, device, POLICIES[config.train.precision].compute)
    shares = one_host and device.type == "cpu" and config.train.transport == "auto" and host_identity() is not None
    forward = MicroBatch(
        shape, layout, config.data.sequence_length, policy.compute.itemsize, kernel,
        eight=EightBits.from_formats(policy, config.float8),
    )
    kept = np.zeros(program.stages)  # bytes kept from a forward until its backward
    for rank in range(layout.pp if layout.schedule != "terapipe" else 0):
        for stage, part in zip(program.rank_stages(rank), rank_parts(shape, program, rank), strict=True):
            saved = activations.stage(forward, part.layers, first=part.first, last=part.last)
            kept[stage] = activations.total(saved)
    peaks = build_columns(program).peak_bytes(kept, 0.0)
    every = []
    for rank in range(layout.pp):
        state = state_bytes(shape, layout, policy, config.optimizer.name, rank_parts(shape, program, rank))
        weights, optimizer, method = count_method_bytes(config, state, policy)
        if shares and layout.zero in (1, 2):  # full parameters are in one shared memory, of which a rank counts a shard
            dense, experts, edp = state.elements - state.experts, state.experts, layout.expert_shape[2]
            weights -= (dense - dense // layout.shards + experts - experts // edp) * policy.compute.itemsize
        every.append(RankMemory(weights, state.gradients, optimizer + state.estimating, int(peaks[rank]), method))
    return every


def check_memory(config: RunConfig, shape: ModelShape, device: torch.device, ranks: range) -> None:
    """Reject a model that does not fit in the memory of this machine, which has these ranks."""
    layout = config.parallel
    held = count_rank_memory(config, shape, device, one_host=len(ranks) == layout.world_size)
    local = [held[rank * layout.pp // layout.world_size] for rank in ranks]
    fullest = max(local, key=lambda rank: rank.total)
    what, where, available = "", "this machine", host_memory()
    if layout.offload != "none":  # only the engine knows where the rest is; the optimizer states are on the host
        needed = sum(rank.optimizer for rank in local)
        what = f"offloaded optimizer's states alone need {show_bytes(needed)}, "
    elif device.type == "cpu":
        needed = sum(rank.total for rank in local)
        what = f"its {len(local)} ranks here need {show_bytes(needed)}, " if len(local) > 1 else ""
    else:
        needed, where = fullest.total, torch.cuda.get_device_name(device)
        available = torch.cuda.get_device_properties(device).total_memory
    if needed > available:
        raise UsageError(
            f"model.name = '{config.model.name}' ({shape.parameters():,} parameters) does not fit: the fullest rank "
            f"needs {show_bytes(fullest.total)} ({fullest}), {what}and {where} has {show_bytes(available)}."
            "\n  Use a smaller model or batch, more devices, or a layout that needs less: parallel.zero, tp, pp, "
            "recompute. `shoal estimate` shows what each does."
        )


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
        needed = 0  # unknown for a run on several machines, whose ranks check their own parts later
        if len(ranks) == config.parallel.world_size:
            # Two copies, and two more of the neighbours' states if this machine simulates several nodes.
            copies = 4 if 0 < config.failover.node_ranks < len(ranks) else 2
            needed = copies * checkpoint_bytes(config, shape)
        check_run_dir(run_dir(folder or RUNS, config.failover), needed)


def _check_run_folder(folder: Path | None, *, fresh: bool) -> None:
    try:
        if fresh and folder is not None and not is_free(folder):
            raise taken(folder)
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
    policy, all_layers = FORMATS[config.train.precision], [StagePart(range(shape.layers))]
    states = state_bytes(shape, Layout(), policy, config.optimizer.name, all_layers).optimizer
    return shape.parameters() * policy.storage.itemsize + states


def check_disk(config: RunConfig, shape: ModelShape, folder: Path, existing: int = 0) -> None:
    """Reject a run whose checkpoints do not fit on the disk of ``folder``, which has ``existing`` ones already."""
    each = checkpoint_bytes(config, shape)
    every = config.checkpoint.every
    saves = 1 + (config.train.steps - 1) // every if every else 1
    most = min(config.checkpoint.keep + 1, saves) - existing  # a new one is written before the oldest is removed
    disk = nearest_existing(folder)
    size, _, free = shutil.disk_usage(disk)
    if size and most * each > free:  # size 0: not a disk; writing to it reports the error
        raise UsageError(
            f"checkpoints: {most} of {show_bytes(each)} = {show_bytes(most * each)} are kept together, but {disk} has "
            f"{show_bytes(free)} free.\n  Free space, name a folder on another disk, or set checkpoint.keep lower."
        )
