"""Dry run of a model of one's own; and what all dry runs share: one rank counted on fake tensors, and among real
ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.base.terminal import progress_bar
from shoal.base.units import show_bytes
from shoal.engine.collectives.mesh import Mesh
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.time.traffic import Sent
from shoal.planning.own_estimate import OwnEstimate, estimate_own_model
from shoal.report.tables import table_lines
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.training.async_dp.engines import engine_class
from shoal.training.check import check
from shoal.training.dry_run.dry_run import Counted, CountedStep, count, dry_run, make_samples
from shoal.training.dry_run.tracker import Tracker

MOST_RANKS = 8  # started on one machine for a measurement


@dataclass(frozen=True)
class OwnDryRun:
    """The first steps of one rank of a model of one's own; see `DryRun`."""

    estimate: OwnEstimate
    counted: Counted
    measured: Counted | None

    def lines(self) -> Iterator[str]:
        """Yield the counts of the last step, with the memory of the fullest rank by the estimate."""
        counted, step, config = self.counted, self.counted.steps[-1], self.estimate.config
        yield (f"{counted.where} of {config.parallel.world_size:,}, step {len(counted.steps)} of {config.model.title}: "
               "counted (fullest rank by the estimate)")
        yield f"  parameters        {counted.parameters:,} ({self.estimate.counts.parameters:,})"
        yield f"  FLOPs             {sum(step.flops.values()):,}"
        for name, size in counted.held.items():
            if name != "host":
                yield f"  {name:<16}  {show_bytes(size):>8}"
        estimated = sum(size for kind, size in self.estimate.memory.items() if kind != "libraries")
        yield f"  peak of memory    {show_bytes(step.peak):>8} ({show_bytes(estimated)})"
        yield from show_last(step, self.measured)


def dry_run_own_model(
    config: RunConfig, cluster: str | Cluster = "8xH100", *, rank: int = 0, steps: PositiveInt = 4,
    measure: bool = False,
) -> OwnDryRun:  # fmt: skip
    """Execute one rank of a run of a model of one's own on fake tensors, and count what it does; see `dry_run`.

    Its operators are counted as on the CPU; transfers as by NCCL, or with ``measure`` by gloo.

    Raises:
        UsageError: as for `shoal.estimate_own_model`; the rank does not exist, or there are too many to measure; or the
            module reads values, of which fake tensors have none.

    >>> import shoal, torch
    >>> run = shoal.Run(
    ...     model=lambda: torch.nn.Linear(4, 1), loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    ...     data=torch.ones(16, 4), global_batch=16,
    ... )
    >>> found = run.dry_run(shoal.Layout(dp=8, zero=1), steps=1)  # which calls this
    >>> found.counted.parameters, found.counted.steps[0].sent["dp", "all-reduce"] > 0
    (5, True)
    """
    check_ranks(config.parallel, rank, measure)
    estimate = estimate_own_model(config, cluster)
    return OwnDryRun(estimate, *count_rank(config, check(config), rank, steps, measure))


def check_ranks(layout: Layout, rank: int, measure: bool) -> None:
    """Raise `UsageError` if a layout has no such rank, or too many to measure."""
    world = layout.world_size
    if not 0 <= rank < world:
        raise UsageError(f"--rank {rank}: {layout.equation()}; ranks are 0 to {world - 1}.")
    if measure and world > MOST_RANKS:
        raise UsageError(f"--measure: {world} ranks; at most {MOST_RANKS} are started on one machine.\n  Leave it out.")


def count_rank(
    config: RunConfig, shape: ModelShape, rank: int, steps: int, measure: bool
) -> tuple[Counted, Counted | None]:
    """Count the first steps of one rank dry, and with ``measure`` among real ranks of this machine."""
    with progress_bar("counting") as show:
        counted = dry_run(config, shape, rank, steps=steps, on_cpu=measure, show=show)
    if not measure:
        return counted, None
    with Pool(config.parallel.world_size) as pool:
        return counted, pool.run(_measure, config.parallel.world_size, config, shape, steps, timeout=600)[rank]


def show_last(step: CountedStep, measured: Counted | None, formulas: Sent | None = None) -> Iterator[str]:
    """Yield the measured memory of a step and its collectives as text, with their bytes by formula if there is one."""
    if measured:
        peak = measured.steps[-1].peak
        yield f"  the same run here {show_bytes(peak):>8}, {100 * (step.peak / peak - 1):+.2f} % was counted dry"
    yield "collectives of the step"
    rows = []
    for (axis, kind), sent in sorted(step.sent.items()):
        sizes = {size: calls for (a, k, size), calls in step.calls.items() if (a, k) == (axis, kind)}
        each = f"{show_bytes(min(sizes))} to {show_bytes(max(sizes))}" if len(sizes) > 1 else show_bytes(*sizes)
        formula = f"  ({show_bytes(formulas.get((axis, kind), 0))})" if formulas else ""
        rows.append((axis, kind, f"{sum(sizes.values()):,}", each, show_bytes(sent) + formula))
    head = ("axis", "kind", "calls", "bytes of each", "sent  (by formula)" if formulas else "sent")
    yield from (f"  {line}" for line in table_lines(head, rows, right=2))


def _measure(config: RunConfig, shape: ModelShape, steps: int) -> Counted:
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    with Tracker() as tracker:
        engine = engine_class(config)(config, shape, mesh, make_samples(config, shape))
        return count(engine, tracker, steps)
