"""Select the bucket size for `parallel.bucket_mb = "auto"` by timing dry steps.

Small buckets are reduced sooner, large ones in fewer collectives; the best size depends on the model, the batch, the
ranks and their network. The size determines shard boundaries and the order in which squares are summed, so the run
folder stores it: a resumed run computes the same bits.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.base.files import read_json, write_atomically
from shoal.base.journal import best_effort
from shoal.base.section import plain
from shoal.engine.collectives.json_collectives import broadcast, world
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Dataset
from shoal.engine.device import synchronize
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import engine_class
from shoal.training.step.engine import Engine

SIZES = (1.0, 4.0, 16.0, 64.0)
"""Candidate bucket sizes [MiB]."""

STEPS = 3  # measured dry steps, after one warm-up step
BUCKET_FILE = "bucket_mb.json"


def settle_bucket_size(
    config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset, folder: Path, *, resume: bool
) -> tuple[RunConfig, str]:
    """Return the config with "auto" replaced by a size, equal on every rank, and a note about it.

    Args:
        folder: run folder; stores the size for a resume on the same layout.
    """
    layout = config.parallel
    if layout.dp == 1 or layout.zero == 3 or layout.sync != "all-reduce":
        return _with(config, layout.bucket_bytes / 2**20), "bucket_mb = auto: nothing to choose in this layout"
    kept = broadcast(_kept(config, folder) if resume and mesh.rank == 0 else None, world())
    if kept is not None:
        return _with(config, kept), f"bucket_mb = auto: {kept:g} MiB, as measured when the run began"
    seconds = sweep(config, shape, mesh, samples)
    best = min(seconds, key=seconds.__getitem__)
    if mesh.rank == 0:
        found = {"bucket_mb": best, "seconds": seconds, "measured on": _circumstances(config)}
        with best_effort(folder / BUCKET_FILE):  # without it, a resumed run measures again
            write_atomically(folder / BUCKET_FILE, json.dumps(found, indent=1) + "\n")
    times = ", ".join(f"{size:g}: {time * 1e3:.0f} ms" for size, time in seconds.items())
    return _with(config, best), f"bucket_mb = auto: {best:g} MiB (a step with {times})"


def sweep(config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset) -> dict[float, float]:
    """Return the step time [s] on the slowest rank by bucket size [MiB]; equal on all ranks.

    Sizes that give the same buckets as the previous size are omitted.
    """
    seconds: dict[float, float] = {}
    cuts = -1
    for size in SIZES:
        candidate = _with(config, size)
        engine = engine_class(candidate)(candidate, shape, mesh.with_layout(candidate.parallel), samples)
        count = torch.tensor(len(engine.parameters.buckets), device=mesh.device)
        before, cuts = cuts, to_host(all_reduce(count, mesh.group("world")))
        if cuts != before:
            slowest = torch.tensor(_time(engine), dtype=torch.float64, device=mesh.device)
            seconds[size] = to_host(all_reduce(slowest, mesh.group("world"), dist.ReduceOp.MAX))
        del engine
        gc.collect()  # modules and hooks are cyclic garbage, and the next engine needs the memory
    return seconds


def _time(engine: Engine) -> float:
    times = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        engine.step(0, dry=True)
        synchronize(engine.mesh.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _with(config: RunConfig, size: float) -> RunConfig:
    return config.replace(parallel={"bucket_mb": size})


def _circumstances(config: RunConfig) -> dict:
    return {"model": plain(config.model), "parallel": plain(config.parallel), "global_batch": config.train.global_batch}


def _kept(config: RunConfig, folder: Path) -> float | None:
    """Return the size stored in the folder; None if it is missing, damaged or measured with another config."""
    try:
        found = read_json(folder / BUCKET_FILE)
        same, size = found["measured on"] == _circumstances(config), float(found["bucket_mb"])
    except (UsageError, ValueError, KeyError, TypeError):
        return None
    return size if same and 0 < size < float("inf") else None
