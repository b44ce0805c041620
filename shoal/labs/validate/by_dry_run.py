"""Dry run: count one rank's real model on fake tensors, and compare it with formulas and with a real run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pydantic import PositiveInt

from shoal.base.units import show_bytes, show_metric
from shoal.engine.collectives.mesh import DryMesh, Mesh
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import build_layout_program, choose_slices
from shoal.planning.cost.counts import RankCounts
from shoal.planning.cost.time.traffic import Sent
from shoal.planning.describe import describe_run
from shoal.planning.estimate import Estimate
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.testing.own_dry_run import check_ranks, count_rank, show_last
from shoal.training.dry_run.dry_run import Counted
from shoal.training.step.model_state import attention_kernel


@dataclass(frozen=True)
class DryRun:
    """The first steps of one rank.

    Attributes:
        estimate: estimate of the run.
        pp_index: the pipeline rank.
        counted: counts on fake tensors: parameters, bytes held, and for each step FLOPs, bytes sent and memory.
        measured: the same counts in a process of this machine, if it was started.
        flops: FLOPs of a step by formula.
        sent: bytes of a step by axis and kind of collective, by formula, if one exists.
    """

    estimate: Estimate
    pp_index: int
    counted: Counted
    measured: Counted | None
    flops: int
    sent: Sent | None

    def __repr__(self) -> str:
        step, world = self.counted.steps[-1], self.estimate.run.layout.world_size
        flops, peak = show_metric(sum(step.flops.values()), "FLOP"), show_bytes(step.peak)
        return f"<DryRun: {self.counted.where} of {world:,}: {flops} a step, peak of memory {peak}>"

    def lines(self) -> Iterator[str]:
        """Yield the counts of the last step, with those by formula."""
        counted, step, world = self.counted, self.counted.steps[-1], self.estimate.run.layout.world_size
        yield f"{counted.where} of {world:,}, step {len(counted.steps)} of the run: counted (by formula)"
        yield f"  parameters        {counted.parameters:,}"
        yield f"  FLOPs             {sum(step.flops.values()):,} ({self.flops:,})"
        memory = self.estimate.memory[self.pp_index]
        for name, size in counted.held.items():
            if name != "host":
                yield f"  {name:<16}  {show_bytes(size):>8} ({show_bytes(getattr(memory, name))})"
        kernels = f" with the kernels of {self.estimate.cluster.accelerator.name}" if self.measured else ""
        yield f"  peak of memory    {show_bytes(step.peak):>8} ({show_bytes(memory.allocated)}{kernels})"
        yield from show_last(step, self.measured, self.sent)


def dry_run(
    layout: Layout, *, model: str | None = None, cluster: str = "8xH100", config: RunConfig | None = None,
    sequence_length: PositiveInt | None = None, global_batch: int | str | None = None, precision: str | None = None,
    optimizer: str | None = None, fill: bool | None = None, rank: int = 0, steps: PositiveInt = 4,
    measure: bool = False,
) -> DryRun:  # fmt: skip
    """Execute the real model and pipeline of one rank on fake tensors, and count what it does.

    Nothing is computed and no other rank is started, so a laptop can count a rank of a world of any size: FLOPs, bytes
    of every collective, and memory action by action. Runs without a formula for their time can be counted too.

    Args:
        layout: how the model is split; see `shoal.estimate` for this and the other arguments.
        global_batch: sequences per step (default: the config's, else two micro-batches for each pipeline stage: later
            ones do the same again).
        rank: the rank to count; ranks of the same pipeline rank differ little.
        steps: number of first steps to count.
        measure: also start all ranks on this machine (at most 8), and count this rank on real tensors.

    Returns:
        The counts, with the estimate and the formulas.

    Raises:
        UsageError: as for `shoal.estimate`; or the rank does not exist, or there are too many ranks to measure.

    >>> import shoal
    >>> counted = shoal.dry_run(shoal.Layout(tp=2), model="tiny", cluster="2xH100", sequence_length=32, steps=1,
    ...                         global_batch=1)
    >>> sum(counted.counted.steps[-1].flops.values()) == counted.flops
    True
    """
    run = describe_run(
        layout, model=model, cluster=cluster, config=config, sequence_length=sequence_length,
        global_batch=global_batch, precision=precision, optimizer=optimizer, fill=fill,
    )  # fmt: skip
    if global_batch is None and config is None:
        few = 2 * run.layout.pp * run.layout.dp * run.layout.micro_batch
        run = replace(run, global_batch=min(run.global_batch, few))
    check_ranks(run.layout, rank, measure)
    estimate = Estimate(run)
    config = _config(estimate, config)
    counted, measured = count_rank(config, run.shape, rank, steps, measure)
    mesh = DryMesh(config.parallel, rank)
    formulas = _formulas(config, estimate, mesh, on_cpu=measure)
    sent = formulas.sent() if config.parallel.sync == "all-reduce" else None
    return DryRun(estimate, mesh.index("pp"), counted, measured, formulas.flops(), sent)


def _config(estimate: Estimate, config: RunConfig | None) -> RunConfig:
    """Return the config of the estimated run, on synthetic tokens."""
    run, base = estimate.run, config or build_config({"data": {"source": "synthetic"}})
    return base.replace(
        parallel=run.layout,
        data={"source": "synthetic", "sequence_length": run.sequence_length},
        train={"global_batch": run.global_batch, "precision": run.precision},
        optimizer={"name": run.optimizer},
    )


def _formulas(config: RunConfig, estimate: Estimate, mesh: Mesh, *, on_cpu: bool) -> RankCounts:
    """Build the formulas of a rank's step, with torch's attention kernel on the CPU (``on_cpu``) or on CUDA."""
    run, device = estimate.run, torch.device("cpu" if on_cpu else "cuda")
    kernel = attention_kernel(config.train.attention, device, POLICIES[run.precision].compute)
    s = run.sequence_length
    slices = choose_slices(run.layout, run.shape, microbatches=run.microbatches, sequence_length=s)
    program = build_layout_program(run.layout, run.microbatches, len(slices))
    one = replace(
        estimate.forward, kernel=kernel, fused=run.fuses and not on_cpu, by_lengths=run.by_lengths and not on_cpu
    )
    return RankCounts(
        one, program, mesh, run.policy, slices, by_parts=run.layout.overlaps_products(background=False)
    )
