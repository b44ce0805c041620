"""`shoal goodput`: how much of a long training counts, how often to save, how many spares to keep."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.text import Text

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import check_place
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import parse_counts
from shoal.report.planning.goodput_report import goodput_figure, goodput_lines

HOUR = 3600.0


class GoodputOptions(Section):
    devices: str = "1024,4096,16384,100000"
    """That a job needs, with commas."""

    mtbf: PositiveFloat | None = None
    """Hours between failures of one device (default: 50,677, as in 54 days of Llama 3)."""

    checkpoint: str = "30s"
    """That training stops for a save: 30s, 2min."""

    flush: str = "0s"
    """That a save is then written for in the background: until it is, a failure loses the interval before as well."""

    restart: str = "5min"
    """From a failure until training goes on, without what is done again."""

    interval: str | None = None
    """Of work between saves (default: the best)."""

    per_node: PositiveInt = 8
    """Devices that fall out together."""

    spares: NonNegativeInt | None = None
    """Nodes that stand by (default: as many as --availability needs)."""

    repair: str = "1d"
    """Until a failed node is back."""

    availability: float = Field(0.99, gt=0, lt=1)
    """Of enough whole nodes, for which spares are counted."""

    failures: PositiveInt = 20000
    """Of each simulation."""

    seed: NonNegativeInt = 0
    """Of the simulation."""

    out: Path | None = None
    """Write a figure (.svg)."""


def run(options: GoodputOptions) -> int:
    """Compute, simulate, print and draw; return the exit code.

    Raises:
        UsageError: no numbers, or a save that takes longer than the job lives.
    """
    if options.out and options.out.suffix != ".svg":
        raise UsageError(f"--out {options.out}: a figure ends in .svg")
    check_place(options.out, "--out")
    if options.spares is not None:
        reject_unused(options, ("availability",), "--spares says how many there are")
    counts = parse_counts(
        options.devices, where="--devices", form="give numbers, as 1024,16384", too_small="a job needs at least one"
    )
    forecasts = [
        shoal.goodput(
            devices, mtbf=options.mtbf * HOUR if options.mtbf else None, checkpoint=options.checkpoint,
            flush=options.flush, restart=options.restart, interval=options.interval, per_node=options.per_node,
            spares=options.spares, repair=options.repair, availability=options.availability,
            failures=options.failures, seed=options.seed,
        )
        for devices in counts
    ]  # fmt: skip
    console = Console(highlight=False)
    for line in goodput_lines(forecasts):
        console.print(Text(line), soft_wrap=True)
    if options.out:
        figure = goodput_figure([forecast.job for forecast in forecasts], options.seed)
        options.out.write_text(figure, encoding="utf-8")
        console.print(Text(f"written: {options.out}"), soft_wrap=True)
    return 0
