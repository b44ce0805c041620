"""Check that a run fits in the memory of this machine, and find the nearest layouts that do.

On CUDA it is the estimated peak of all tensors, which equals a dry run's count, and what libraries take. On the CPU,
and where no estimate exists, it is a lower bound: weights, gradients, optimizer states and saved activations. A
rejected run could not have run. One that passes may still not fit, because the allocator fragments memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shoal.base.errors import UsageError, divisors
from shoal.base.units import show_bytes
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.device import host_memory
from shoal.engine.precision.policy import POLICIES
from shoal.engine.precision.recipe import Recipe
from shoal.pipeline.from_layout import build_layout_program, check_run
from shoal.pipeline.simulator.columns import build_columns
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.planning.cost.parameters import rank_parts
from shoal.planning.describe import read_settings
from shoal.planning.estimable import check_estimable
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.accelerators import match
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.training.async_dp.memory import count_method_bytes
from shoal.training.step.model_state import attention_kernel

MOST_TRIED = 400  # layouts that are counted to find one that fits: about a second
SUGGESTED = 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by kind. Memory shared by the ranks of a host is divided equally among them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    method: int  # of parallel.sync
    temporary: int = 0  # logits, gathered parameters, buffers; not counted on the CPU
    libraries: int = 0  # CUDA's context, workspaces, and buffers of communicators

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        names = {"method": "parallel.sync", "temporary": "logits and temporary", "libraries": "CUDA and NCCL"}
        return ", ".join(f"{names.get(name, name)} {show_bytes(size)}" for name, size in vars(self).items() if size)


def count_rank_memory(
    config: RunConfig, shape: ModelShape, device: torch.device, *, one_host: bool = False
) -> list[RankMemory]:
    """Return the minimum memory of the first rank of every pipeline stage, at the peak of a step.

    Args:
        one_host: whether all ranks are on this host and share memory where possible.
    """
    if device.type == "cuda" and (estimated := _estimate_memory(config, shape, torch.cuda.get_device_name(device))):
        return estimated
    layout, policy = config.parallel, FORMATS[config.train.precision]
    program = build_layout_program(layout, layout.microbatches(config.train.global_batch))
    kernel = attention_kernel(config.train.attention, device, POLICIES[config.train.precision].compute)
    shares = one_host and device.type == "cpu" and config.train.transport == "auto" and host_identity() is not None
    packed = policy.products == "nvfp4" and Recipe.from_config("nvfp4", config.float8).is_native(
        POLICIES[config.train.precision].compute, device
    )
    forward = MicroBatch(
        shape, layout, config.data.sequence_length, policy.compute.itemsize, kernel,
        fused=device.type == "cuda" and policy.compute.itemsize < 8,
        eight=EightBits.from_formats(policy, config.float8, packed=packed),
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


def _estimate_memory(config: RunConfig, shape: ModelShape, device_name: str) -> list[RankMemory]:
    """Return the estimated peak of every pipeline rank on CUDA; empty for an unknown device or without formulas."""
    accelerator, train = match(device_name), config.train
    if accelerator is None or config.parallel.offload != "none":
        return []
    run = EstimatedRun(
        shape, config.parallel, Cluster(accelerator.name, accelerator, 1, 1), config.data.sequence_length,
        train.global_batch, train.precision, config.optimizer.name, **read_settings(config),
    )
    try:
        check_estimable(run)
    except UsageError:
        return []
    estimate = Estimate(run)
    expected = estimate.calibration.expected().numbers
    libraries = int(1e9 * (expected["base"] + expected["context"]))
    return [
        RankMemory(
            int(peak.parameters), int(peak.gradients), int(peak.optimizer), int(peak.activations), 0,
            int(peak.gathered + peak.buffers + peak.stashed), libraries,
        )
        for peak in estimate.memory
    ]


def check_memory(config: RunConfig, shape: ModelShape, device: torch.device, ranks: range) -> None:
    """Reject a model that does not fit in the memory of this machine, which has these ranks.

    Raises:
        UsageError: the message has the memory by kind, and the nearest layouts of as many ranks that fit.
    """
    problem = _explain_excess(config, shape, device, ranks)
    if problem is None:
        return
    n = config.parallel.world_size
    fitting = itertools.islice(find_fitting_layouts(config, shape, device, ranks), SUGGESTED)
    found = "\n".join(f"    {options}" for options in fitting)
    raise UsageError(
        f"model.name = '{config.model.name}' ({shape.parameters():,} parameters) does not fit: {problem}\n  " + (
            f"These options fit on {n} rank{'s' * (n > 1)}:\n{found}" if found else
            "No layout that was tried on as many ranks fits. Use a smaller model or batch, or more devices; "
            "`shoal plan` finds layouts for a larger cluster."
        )
    )


def _explain_excess(config: RunConfig, shape: ModelShape, device: torch.device, ranks: range) -> str | None:
    """Return why a run does not fit, or None."""
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
    if needed <= available:
        return None
    return (
        f"the fullest rank needs {show_bytes(fullest.total)} ({fullest}), {what}and {where} has "
        f"{show_bytes(available)}."
    )


def find_fitting_layouts(
    config: RunConfig, shape: ModelShape, device: torch.device, ranks: range
) -> Iterator[str]:
    """Yield the command-line options of layouts of as many ranks that fit, those with the fewest changes first."""
    for changes in itertools.islice(_changes(config.parallel), MOST_TRIED):
        changed = config.replace(parallel=changes)
        try:
            check_run(changed, shape)
        except UsageError:
            continue
        if _explain_excess(changed, shape, device, ranks) is None:
            yield " ".join(f"--parallel.{name} {value}" for name, value in changes.items())


def _changes(layout: Layout) -> Iterator[dict[str, object]]:
    """Yield changed fields that may save memory, the cheapest for the step time first."""
    zeros = [layout.zero]
    if layout.sync == "all-reduce":
        zeros += [zero for zero in (1, 3) if zero > layout.zero]
    recomputes = {"none": ("none", "selective", "full"), "selective": ("selective", "full")}.get(layout.recompute)
    micro = sorted(divisors(layout.micro_batch), reverse=True)
    degrees = [
        (tp, pp) for tp in divisors(layout.world_size) for pp in divisors(layout.world_size // tp)
        if tp >= layout.tp and pp >= layout.pp and layout.dp * layout.tp * layout.pp % (tp * pp) == 0
    ]
    every = itertools.product(degrees, recomputes or (layout.recompute,), micro, zeros)
    found = []
    for (tp, pp), recompute, micro_batch, zero in every:
        dp = layout.dp * layout.tp * layout.pp // (tp * pp)
        new = {"dp": dp, "tp": tp, "pp": pp, "zero": zero if dp > 1 else layout.zero, "micro_batch": micro_batch,
               "recompute": recompute}  # fmt: skip
        changed = {name: value for name, value in new.items() if value != getattr(layout, name)}
        if changed and changed not in found:
            found.append(changed)
    yield from sorted(found, key=len)
