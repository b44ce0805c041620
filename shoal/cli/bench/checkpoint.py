"""`shoal bench checkpoint`: what saving costs a training step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from pydantic import Field, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.labs.bench.checkpoint import TARGET, Cost, measure, seconds_to_restore
from shoal.labs.bench.progress import telling
from shoal.labs.bench.step.workload import Workload
from shoal.spec.catalog import model_shape
from shoal.spec.config import FailoverConfig


class CheckpointBenchOptions(Section):
    """Training steps that save nothing, on disk, in memory, and in another node's memory, in turn; exit code 1 if a
    save holds up more than 5 % of a step."""

    turns: PositiveInt = 8
    """Turns of each; what is compared are medians over all."""

    every: int = Field(10, ge=2)
    """Steps between two saves, and in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks."""

    ranks: PositiveInt = 2
    """Ranks of one thread, each of which is a node where states go to another."""

    model: str = "bench-10m"
    """A model of the catalog."""

    disk: Path = Path(tempfile.gettempdir())
    """A folder on the disk to save on."""

    memory: Path = FailoverConfig().memory_folder
    """A folder in memory (tmpfs)."""


def checkpoint(options: CheckpointBenchOptions, console: Console) -> int:
    """Measure and print; returns the exit code.

    Raises:
        UsageError: sequences that the ranks cannot share, or no such folder or model.
    """
    if options.sequences % options.ranks:
        raise UsageError(
            f"bench checkpoint --sequences {options.sequences}: give a multiple of --ranks {options.ranks}."
        )
    for name in ("disk", "memory"):
        if not (folder := getattr(options, name)).is_dir():
            raise UsageError(f"bench checkpoint --{name} {folder}: there is no such folder.")
    model_shape(options.model)  # which is refused here if there is none
    workload = Workload(options.model, sequences=options.sequences)
    with telling(console) as tell:
        costs = measure(workload, options.ranks, options.every, options.turns, options.disk, options.memory, say=tell)
        restoring = seconds_to_restore(workload, options.ranks, options.memory, repeats=5)
    console.print(table(costs, options.every))
    console.print(
        f"restored on {options.ranks} ranks in {median(restoring):.3f} s (median of {len(restoring)}), from the next "
        "node's memory where there is one", highlight=False,
    )
    shares = [share(cost, costs[0]) for cost in costs[1:]]
    return 1 if any(part is not None and part > TARGET for part in shares) else 0


def share(cost: Cost, plain: Cost) -> float | None:
    """What a save holds up, as part of a step."""
    return None if cost.stall is None else cost.stall / plain.seconds


def table(costs: list[Cost], every: int) -> Table:
    """The result as people read it."""
    table = Table(title=f"a training that saves every {every} steps")
    table.add_column("saved")
    for column in ("ms / step", "time", "quartiles", "a save holds up ms", "the first", "of a step", "target"):
        table.add_column(column, justify="right")
    for cost in costs:
        part = share(cost, costs[0])
        middle, low, high = cost.ratio
        table.add_row(
            cost.name, f"{cost.seconds * 1e3:.1f}", f"x {middle:.3f}", f"{low:.3f} to {high:.3f}",
            *(("", "", "", "") if part is None else (
                f"{cost.stall * 1e3:.2f}", f"{cost.first * 1e3:.1f}", f"{part:.1%}",
                f"{TARGET:.0%} " + ("[green]met" if part <= TARGET else "[red]missed"),
            )),
        )
    return table
