"""Check, before anything is created, that a run's tensors and checkpoints fit on this machine.

The count is a lower bound: a rejected run could not have run. Parts that are not counted (interpreter, allocator
fragmentation, gathered layers, loss, temporaries of the update) may still not fit.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.base.errors import UsageError
from shoal.base.files import nearest_existing
from shoal.base.units import show_bytes
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.device import host_memory
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.simulator.columns import build_columns
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.float8 import EightBits
from shoal.planning.cost.memory.state import StateBytes, state_bytes
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import StagePart, parts_of
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, Formats
from shoal.training.async_dp.memory import count_method_bytes
from shoal.training.step.engine_state import attention_kernel


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by kind. Memory shared by the ranks of a host is divided equally among them.

    Attributes:
        method: memory of the method selected by parallel.sync.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    method: int = 0

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
        eight=EightBits.of(policy, config.float8),
    )
    kept = np.zeros(program.stages)  # bytes kept from a forward until its backward
    for rank in range(layout.pp if layout.schedule != "terapipe" else 0):
        for stage, part in zip(program.rank_stages(rank), parts_of(shape, program, rank), strict=True):
            saved = activations.stage(forward, part.layers, first=part.first, last=part.last)
            kept[stage] = activations.total(saved)
    peaks = build_columns(program).peak_bytes(kept, 0.0)
    every = []
    for rank in range(layout.pp):
        state = state_bytes(shape, layout, policy, config.optimizer.name, parts_of(shape, program, rank))
        relaxed = count_method_bytes(config, state, policy)
        weights = relaxed.weights - (_held_once(config, state, policy) if shares else 0)
        optimizer = relaxed.optimizer + state.estimating
        every.append(RankMemory(weights, state.gradients, optimizer, int(peaks[rank]), relaxed.method))
    return every


def _held_once(config: RunConfig, state: StateBytes, policy: Formats) -> int:
    """Return the bytes of a rank's full parameters that are counted for other ranks of its host.

    All shards are views of one shared memory (`shoal.engine.collectives.group.allocate`).
    """
    layout = config.parallel
    if layout.zero not in (1, 2):
        return 0
    shards, edp = layout.shards, layout.expert_shape[2]
    dense, experts = state.elements - state.experts, state.experts
    return (dense - dense // shards + experts - experts // edp) * policy.compute.itemsize


def check_memory(config: RunConfig, shape: ModelShape, device: torch.device, ranks: range) -> None:
    """Reject a model that does not fit in this machine's memory.

    Args:
        ranks: ranks on this machine.

    Raises:
        UsageError: the message has the memory that a rank needs and the memory available.
    """
    layout = config.parallel
    held = count_rank_memory(config, shape, device, one_host=len(ranks) == layout.world_size)
    here = [held[rank * layout.pp // layout.world_size] for rank in ranks]
    fullest = max(here, key=lambda rank: rank.total)
    if layout.offload == "none" and device.type == "cpu":
        needed, there, where = sum(rank.total for rank in here), host_memory(), "this machine has"
        what = f"its {len(here)} ranks here need {show_bytes(needed)}, " if len(here) > 1 else ""
    elif layout.offload == "none":
        needed, there = fullest.total, torch.cuda.get_device_properties(device).total_memory
        what, where = "", f"{torch.cuda.get_device_name(device)} has"
    else:  # only the engine knows where the rest is; the optimizer states are on the host
        needed, there, where = sum(rank.optimizer for rank in here), host_memory(), "this machine has"
        what = f"offloaded optimizer's states alone need {show_bytes(needed)}, "
    if needed > there:
        raise UsageError(
            f"model.name = '{config.model.name}' ({shape.parameters():,} parameters) does not fit: the fullest rank "
            f"needs {show_bytes(fullest.total)} ({fullest}), {what}and {where} {show_bytes(there)}."
            "\n  Use a smaller model or batch, more devices, or a layout that needs less: parallel.zero, tp, pp, "
            "recompute. `shoal estimate` tells what each does."
        )


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of a checkpoint's weights and moments."""
    policy, whole = FORMATS[config.train.precision], [StagePart(range(shape.layers))]
    states = state_bytes(shape, Layout(), policy, config.optimizer.name, whole).optimizer
    return shape.parameters() * policy.storage.itemsize + states


def check_disk(config: RunConfig, shape: ModelShape, folder: Path, existing: int = 0) -> None:
    """Reject a run whose checkpoints do not fit on the disk.

    Args:
        folder: checkpoint folder; need not exist.
        existing: number of checkpoints already in it.

    Raises:
        UsageError: the message has the needed and the free space.
    """
    each = checkpoint_bytes(config, shape)
    every = config.checkpoint.every
    saves = 1 + (config.train.steps - 1) // every if every else 1
    most = min(config.checkpoint.keep + 1, saves) - existing  # a new one is written before the oldest is removed
    there = nearest_existing(folder)
    size, _, free = shutil.disk_usage(there)
    if size and most * each > free:  # size 0: not a disk; writing to it reports the error
        raise UsageError(
            f"checkpoints: {most} of {show_bytes(each)} = {show_bytes(most * each)} are kept at once, but {there} has "
            f"{show_bytes(free)} free.\n  Make room, name a folder on another disk, or set checkpoint.keep lower."
        )
