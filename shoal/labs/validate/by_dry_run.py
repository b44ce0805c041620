"""`shoal estimate --dry-run`: what a rank really does in its first steps, counted on fake tensors, beside the estimate.

With ``--measure`` the run's ranks are started here, on real tensors, and counted by the same tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes
from shoal.engine.collectives.dry_groups import DryMesh
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.precision.policy import POLICIES
from shoal.launch.worker_pool import Pool
from shoal.pipeline.from_layout import program_of, slices_of
from shoal.planning.cost.counts import RankCounts
from shoal.planning.estimate import Estimate
from shoal.report.planning.memory_page import write_memory_page
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.training.dry_run.dry_run import Counted, count, dry_run, samples_of
from shoal.training.dry_run.tracker import Tracker
from shoal.training.step.engine import Engine
from shoal.training.step.engine_state import attention_kernel

T = TypeVar("T")

MOST_RANKS = 8  # that are started on one machine to be measured


def config_of(estimate: Estimate, config: RunConfig | None) -> RunConfig:
    """The run that was estimated, to be executed on tokens that do not matter."""
    run, base = estimate.run, config or build_config({"data": {"source": "synthetic"}})
    return base.model_copy(
        update={
            "parallel": run.layout,
            "data": base.data.model_copy(update={"source": "synthetic", "sequence_length": run.sequence_length}),
            "train": base.train.model_copy(update={"global_batch": run.global_batch, "precision": run.precision}),
            "optimizer": base.optimizer.model_copy(update={"name": run.optimizer}),
        }
    )


def formulas(config: RunConfig, estimate: Estimate, mesh: Mesh, *, as_here: bool) -> RankCounts:
    """What formulas say that a rank does in a step, with attention as torch has it on the CPU or on CUDA."""
    run, device = estimate.run, torch.device("cpu" if as_here else "cuda")
    kernel = attention_kernel(config.train.attention, device, POLICIES[run.precision].compute)
    s = run.sequence_length
    slices = slices_of(run.layout, run.shape, microbatches=run.microbatches, sequence_length=s)
    program = program_of(run.layout, run.microbatches, len(slices))
    one = replace(estimate.forward, kernel=kernel)
    return RankCounts(
        one, program, mesh, run.policy, slices, by_parts=run.layout.overlaps_products(background=False)
    )


def run_dry(
    estimate: Estimate, config: RunConfig | None, *, rank: int, steps: int, measure: bool, out: Path | None
) -> Iterator[str]:
    """Count, and say what was counted, line by line; write the page.

    Args:
        rank: which one; those of the same pipeline rank differ little.
        measure: start all ranks here as well.

    Raises:
        UsageError: there is no such rank, or too many to be started here.
    """
    config, shape, world = config_of(estimate, config), estimate.run.shape, estimate.run.layout.world_size
    if rank >= world:
        raise UsageError(f"--rank {rank}: {estimate.run.layout.equation()}; ranks are 0 to {world - 1}")
    if measure and world > MOST_RANKS:
        raise UsageError(f"--measure: {world} ranks; at most {MOST_RANKS} are started on one machine.\n  Leave it out.")
    counted = dry_run(config, shape, rank, steps=steps, as_here=measure)
    measured = measured_ranks(config, shape, steps)[rank] if measure else None
    yield from said(estimate, config, counted, measured)
    if out:
        write_memory_page(out, estimate, counted, measured)
        yield f"written: {out}"


def measured_ranks(config: RunConfig, shape: ModelShape, steps: int) -> list[Counted]:
    """The same steps of every rank, in processes of this machine."""
    with Pool(config.parallel.world_size) as pool:
        return pool.run(_measure, config.parallel.world_size, config, shape, steps, timeout=600)


def _measure(config: RunConfig, shape: ModelShape, steps: int) -> Counted:
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    with Tracker() as tracker:
        return count(Engine(config, shape, mesh, samples_of(config, shape)), tracker, steps)


def said(estimate: Estimate, config: RunConfig, counted: Counted, measured: Counted | None) -> Iterator[str]:
    """What was counted, beside what formulas say."""
    run, step = estimate.run, counted.steps[-1]
    mesh = DryMesh(run.layout, counted.rank)
    pp, ours = mesh.index("pp"), formulas(config, estimate, mesh, as_here=measured is not None)
    flops, formula, by_formula = sum(step.flops.values()), said_of(ours.flops), said_of(ours.sent)
    yield f"{counted.where} of {run.layout.world_size:,}, step {len(counted.steps)} of the run: counted (by formula)"
    yield f"  parameters        {counted.parameters:,}"
    yield f"  FLOPs             {flops:,}" + (f" ({formula:,})" if formula else "")
    memory = estimate.memory[pp]
    for name, size in counted.held.items():
        if name != "host":
            yield f"  {name:<16}  {show_bytes(size):>8} ({show_bytes(getattr(memory, name))})"
    yield f"  peak of memory    {show_bytes(step.peak):>8} ({show_bytes(memory.allocated)})"
    if measured:
        here = measured.steps[-1].peak
        yield f"  the same run here {show_bytes(here):>8}, {100 * (step.peak / here - 1):+.2f} % was counted dry"
    yield "collectives of the step"
    beside = "  (by formula)" if by_formula else ""
    yield f"  {'axis':<13}{'kind':<16}{'calls':>8}{'bytes of each':>24}{'sent':>10}{beside}"
    for (axis, kind), sent in sorted(step.sent.items()):
        sizes = {size: calls for (a, k, size), calls in step.calls.items() if (a, k) == (axis, kind)}
        each = show_bytes(min(sizes))
        each += f" to {show_bytes(max(sizes))}" if len(sizes) > 1 else ""
        yield f"  {axis:<13}{kind:<16}{sum(sizes.values()):>8,}{each:>24}{show_bytes(sent):>10}" + (
            f"  ({show_bytes(by_formula.get((axis, kind), 0))})" if by_formula else ""
        )


def said_of(formula: Callable[[], T]) -> T | None:
    """What a formula says, if there is one for the run."""
    try:
        return formula()
    except ValueError:
        return None
