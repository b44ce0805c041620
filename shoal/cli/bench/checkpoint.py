"""`shoal bench checkpoint`: what saving costs a training step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from pydantic import Field, PositiveInt
from rich.console import Console

import shoal
from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.labs.bench.checkpoint import measure_model, table
from shoal.labs.bench.progress import telling
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


def run(options: CheckpointBenchOptions, console: Console) -> int:
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
    shoal.model_shape(options.model)  # which is refused here if there is none
    with telling(console) as tell:
        found = measure_model(
            options.model, sequences=options.sequences, ranks=options.ranks, every=options.every, turns=options.turns,
            disk=options.disk, memory=options.memory, say=tell,
        )
    console.print(table(found, options.every))
    console.print(
        f"restored on {options.ranks} ranks in {median(found.restoring):.3f} s (median of {len(found.restoring)}), "
        "from the next node's memory where there is one", highlight=False,
    )
    return 0 if found.met else 1
