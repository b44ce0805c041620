"""`shoal bench depths`: mixture of depths against dense, loss against training FLOPs."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Literal

from pydantic import Field, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.labs.bench.learning.mixture_of_depths import KINDS, draw, measure, of_kind, write_csv
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


def depths(options: DepthsOptions, console: Console) -> int:
    """Train, print, and draw."""
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench depths --out {options.out}: there is no such folder.")
    with telling(console) as tell:
        runs = measure(
            options.seeds, steps=options.steps, capacity=options.capacity, weight=options.weight, say=tell
        )
    table = Table(title=f"capacity {options.capacity:g} in every other layer, {options.steps} steps, "
                        f"mean of {options.seeds} seeds")
    for column in ("model", "layers", "parameters", "FLOPs a token", "steps", "loss", "foreseen", "right", "recall"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for kind in KINDS:
        mine = of_kind(runs, kind)
        ends = [run.losses[-1] for run in mine]
        foreseen = [
            f"{mean(run.foreseen for run in mine):.3f}", f"{mean(run.predictor.accuracy for run in mine):.1%}",
            f"{mean(run.predictor.recall for run in mine):.1%}",
        ] if mine[0].predictor else [""] * 3
        table.add_row(
            kind, str(mine[0].layers), f"{mine[0].parameters:,}", f"{mine[0].flops:,}", str(mine[0].steps[-1]),
            f"{mean(ends):.3f}", *foreseen,
        )
    console.print(table)
    console.print("foreseen: the loss with each token decided by itself, as in sampling; right: part of the tokens of "
                  "which that was foreseen, recall: of the chosen ones")
    if options.out:
        write_csv(runs, options.out / "depths.csv")
        title = f"Every other layer takes {options.capacity:g} of the tokens, {options.seeds} seeds"
        (options.out / "depths.svg").write_text(draw(runs, title))
    return 0
