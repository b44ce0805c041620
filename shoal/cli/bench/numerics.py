"""`shoal bench numerics`: the table, the plot and the verdict of the number formats."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.labs.bench.learning.numerics import REFERENCE, RUNS, draw, measure, rows, table, write_csv, wrong
from shoal.labs.bench.progress import telling


class NumericsOptions(Section):
    """Loss curves of every precision against float32's; exit code 1 if one is beyond the band, or the one that should
    fail does not."""

    only: str = ""
    """Some of the runs, with semicolons, as in "fp8; mxfp8"; fp32 is always among them."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 150
    """Steps of each run, of 512 tokens."""

    band: PositiveFloat = 0.1
    """Nats per token that the mean validation loss, and the smoothed training loss of any seed in the second half, may
    be from float32's."""

    out: Path | None = None
    """A folder for numerics.csv and numerics.svg."""


def run(options: NumericsOptions, console: Console) -> int:
    """Run the experiment; returns the exit code."""
    wanted = [name.strip() for name in options.only.split(";") if name.strip()] or list(RUNS)
    for name in wanted:
        if name not in RUNS:
            raise UsageError(f"bench numerics --only: there is no '{name}'; {did_you_mean(name, RUNS)}")
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench numerics --out {options.out}: there is no such folder.")
    names = [name for name in RUNS if name in wanted or name == REFERENCE]
    with telling(console) as tell:
        curves = measure(names, options.seeds, options.steps, tell)
    found = rows(curves)
    console.print(table(found, options.band, steps=options.steps, seeds=options.seeds))
    if options.out:
        write_csv(curves, options.out / "numerics.csv")
        title = f"Number formats: {options.steps} steps of 512 tokens, {options.seeds} seeds"
        (options.out / "numerics.svg").write_text(draw(curves, title))
    bad = wrong(found, options.band)
    console.print(
        f"not as stated: {'; '.join(bad)}" if bad else f"all within {options.band:g} nats of float32, and what should "
        "fail does"
    )
    return 1 if bad else 0
