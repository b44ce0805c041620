"""A rank counted on fake tensors, the same rank in a process of this machine, and what formulas say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shoal.engine.collectives.dry_groups import DryMesh
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.precision.policy import POLICIES
from shoal.launch.worker_pool import Pool
from shoal.pipeline.from_layout import program_of, slices_of
from shoal.planning.cost.counts import RankCounts
from shoal.planning.cost.time.traffic import Sent
from shoal.planning.estimate import Estimate
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.training.dry_run.dry_run import Counted, count, dry_run, samples_of
from shoal.training.dry_run.tracker import Tracker
from shoal.training.step.engine import Engine
from shoal.training.step.engine_state import attention_kernel

T = TypeVar("T")


class CountedRank(NamedTuple):
    """A rank's first steps.

    Attributes:
        pp_index: the pipeline rank.
        counted: on fake tensors.
        measured: in a process; None if it was not started.
        flops: of a step, by formula; None where there is none.
        sent: bytes of a step by axis and kind of collective, by formula; None where there is none.
    """

    pp_index: int
    counted: Counted
    measured: Counted | None
    flops: int | None
    sent: Sent | None


def count_rank(estimate: Estimate, config: RunConfig | None, rank: int, steps: int, *, measure: bool) -> CountedRank:
    """Count the first steps of one rank of an estimated run.

    Args:
        config: that the run was described with.
        measure: start all ranks here as well, and count this one on real tensors.
    """
    config, shape = _config(estimate, config), estimate.run.shape
    counted = dry_run(config, shape, rank, steps=steps, as_here=measure)
    measured = _measured_ranks(config, shape, steps)[rank] if measure else None
    mesh = DryMesh(config.parallel, rank)
    formulas = _formulas(config, estimate, mesh, as_here=measure)
    return CountedRank(mesh.index("pp"), counted, measured, _if_known(formulas.flops), _if_known(formulas.sent))


def _config(estimate: Estimate, config: RunConfig | None) -> RunConfig:
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


def _formulas(config: RunConfig, estimate: Estimate, mesh: Mesh, *, as_here: bool) -> RankCounts:
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


def _if_known(formula: Callable[[], T]) -> T | None:
    """What a formula says, if there is one for the run."""
    try:
        return formula()
    except ValueError:
        return None


def _measured_ranks(config: RunConfig, shape: ModelShape, steps: int) -> list[Counted]:
    """The same steps of every rank, in processes of this machine."""
    with Pool(config.parallel.world_size) as pool:
        return pool.run(_measure, config.parallel.world_size, config, shape, steps, timeout=600)


def _measure(config: RunConfig, shape: ModelShape, steps: int) -> Counted:
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    with Tracker() as tracker:
        return count(Engine(config, shape, mesh, samples_of(config, shape)), tracker, steps)
