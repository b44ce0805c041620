"""`shoal bench depths`: mixture of depths against dense, loss against training FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.labs.bench.learning.mixture_of_depths import draw, measure, table, write_csv
from shoal.labs.bench.progress import telling


class DepthsOptions(Section):
    """Layers that only some tokens pass through: their loss as deep as a dense model, and with as many FLOPs."""

    capacity: float = Field(0.25, gt=0, le=1)
    """The part of the tokens that pass through every other layer."""

    weight: Literal["score", "sigmoid"] = "score"
    """What multiplies that which such a layer adds, as of model.depths."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 800
    """Steps of each run; those of the shorter one are as many as cost what the layers that take some tokens do."""

    out: Path | None = None
    """A folder for depths.csv and depths.svg."""


def run(options: DepthsOptions, console: Console) -> int:
    """Train, print, and draw; returns the exit code."""
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench depths --out {options.out}: there is no such folder.")
    with telling(console) as tell:
        runs = measure(
            options.seeds, steps=options.steps, capacity=options.capacity, weight=options.weight, say=tell
        )
    console.print(table(runs, options.capacity, options.steps))
    console.print("foreseen: the loss with each token decided by itself, as in sampling; right: part of the tokens of "
                  "which that was foreseen, recall: of the chosen ones")
    if options.out:
        write_csv(runs, options.out / "depths.csv")
        title = f"Every other layer takes {options.capacity:g} of the tokens, {options.seeds} seeds"
        (options.out / "depths.svg").write_text(draw(runs, title))
    return 0
