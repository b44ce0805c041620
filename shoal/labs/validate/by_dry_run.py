"""A dry run: one rank's real model on fake tensors, counted, beside the estimate and the same rank as it runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes
from shoal.planning.describe import describe_run
from shoal.planning.estimate import Estimate

if TYPE_CHECKING:
    from shoal.planning.cost.time.traffic import Sent
    from shoal.spec.config import RunConfig
    from shoal.spec.layout import Layout
    from shoal.training.dry_run.dry_run import Counted

MOST_RANKS = 8  # that are started on one machine to be measured


@dataclass(frozen=True)
class DryRun:
    """What one rank does in its first steps.

    Attributes:
        estimate: of the run.
        pp_index: the pipeline rank.
        counted: on fake tensors: ``parameters``, ``held`` bytes, and ``steps`` with FLOPs, bytes sent and memory.
        measured: the same in a process of this machine; None if it was not started.
        flops: of a step, by formula; None where there is none.
        sent: bytes of a step by axis and kind of collective, by formula; None where there is none.
    """

    estimate: Estimate
    pp_index: int
    counted: Counted
    measured: Counted | None
    flops: int | None
    sent: Sent | None

    def lines(self) -> Iterator[str]:
        """What was counted in the last step, beside what formulas say."""
        counted, step, world = self.counted, self.counted.steps[-1], self.estimate.run.layout.world_size
        yield f"{counted.where} of {world:,}, step {len(counted.steps)} of the run: counted (by formula)"
        yield f"  parameters        {counted.parameters:,}"
        yield f"  FLOPs             {sum(step.flops.values()):,}" + (f" ({self.flops:,})" if self.flops else "")
        memory = self.estimate.memory[self.pp_index]
        for name, size in counted.held.items():
            if name != "host":
                yield f"  {name:<16}  {show_bytes(size):>8} ({show_bytes(getattr(memory, name))})"
        yield f"  peak of memory    {show_bytes(step.peak):>8} ({show_bytes(memory.allocated)})"
        if self.measured:
            here = self.measured.steps[-1].peak
            yield f"  the same run here {show_bytes(here):>8}, {100 * (step.peak / here - 1):+.2f} % was counted dry"
        yield "collectives of the step"
        beside = "  (by formula)" if self.sent else ""
        yield f"  {'axis':<13}{'kind':<16}{'calls':>8}{'bytes of each':>24}{'sent':>10}{beside}"
        for (axis, kind), sent in sorted(step.sent.items()):
            sizes = {size: calls for (a, k, size), calls in step.calls.items() if (a, k) == (axis, kind)}
            each = show_bytes(min(sizes))
            each += f" to {show_bytes(max(sizes))}" if len(sizes) > 1 else ""
            yield f"  {axis:<13}{kind:<16}{sum(sizes.values()):>8,}{each:>24}{show_bytes(sent):>10}" + (
                f"  ({show_bytes(self.sent.get((axis, kind), 0))})" if self.sent else ""
            )


def dry_run(
    layout: Layout, *, model: str | None = None, cluster: str = "8xH100", config: RunConfig | None = None,
    sequence_length: int | None = None, global_batch: int | None = None, precision: str | None = None,
    optimizer: str | None = None, fill: bool | None = None, rank: int = 0, steps: int = 4, measure: bool = False,
) -> DryRun:  # fmt: skip
    """Execute the real model and pipeline of one rank on fake tensors, and count what it does.

    Nothing is computed and no other rank is started, so a laptop counts a rank of a world of any size: FLOPs, bytes of
    every collective, and memory action by action. Runs that have no formula for their time can be counted too.

    Args:
        layout: how the model is split; this and what is not named here is as in `shoal.estimate`.
        rank: which one to count; those of the same pipeline rank differ little.
        steps: how many of the first steps to count.
        measure: start all ranks here too (at most 8), and count this one on real tensors.

    Returns:
        What was counted, with the estimate and the formulas.

    Raises:
        UsageError: as `shoal.estimate`; or there is no such rank, or too many to start them here.

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
    world = run.layout.world_size
    if rank >= world:
        raise UsageError(f"--rank {rank}: {run.layout.equation()}; ranks are 0 to {world - 1}")
    if measure and world > MOST_RANKS:
        raise UsageError(f"--measure: {world} ranks; at most {MOST_RANKS} are started on one machine.\n  Leave it out.")
    from shoal.labs.validate.counted_rank import count_rank  # which needs torch

    estimate = Estimate(run)
    return DryRun(estimate, *count_rank(estimate, config, rank, steps, measure=measure))
