"""`shoal bench collectives`: the table, as CSV and as a plot."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.files import check_place, write_whole
from shoal.base.section import NonEmpty, Section
from shoal.base.units import BYTES, parse
from shoal.labs.bench.collectives import CollectiveTiming, collectives_named, measure, plot, table, write
from shoal.labs.bench.progress import telling

MOST_RANKS = 32


class CollectivesOptions(Section):
    """Collectives of the backend beside every algorithm over point-to-point transfers, by size and ranks."""

    only: str = "all-reduce"
    """Some of the collectives, with commas, or all."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks."""

    sizes: NonEmpty[str] = ("4kB", "64kB", "1MB", "16MB")
    """Bytes of the largest input or output of one rank."""

    turns: PositiveInt = 9
    """Measurements of each; the median counts."""

    out: Path | None = None
    """Also write the table to this file, .csv."""

    plot: Path | None = None
    """Also draw the bus bandwidth over the size to this file, .svg."""


def run(options: CollectivesOptions, console: Console) -> int:
    """Measure, print, write and draw; returns the exit code.

    Raises:
        UsageError: bad options.
    """
    wanted = collectives_named(options.only)
    sizes = sorted({parse(size, BYTES, where="--sizes") for size in options.sizes})
    if sizes[0] == 0:
        raise UsageError("--sizes: give sizes above 0, such as --sizes 64kB 16MB")
    if not all(2 <= n <= MOST_RANKS for n in options.ranks):
        raise UsageError(f"--ranks {' '.join(map(str, options.ranks))}: 2 to {MOST_RANKS} processes each")
    for path, suffix, option in ((options.out, ".csv", "--out"), (options.plot, ".svg", "--plot")):
        if path is not None and path.suffix != suffix:
            raise UsageError(f"{option} {path}: give a file ending in {suffix}")
        check_place(path, option, new=True)
    rows: list[CollectiveTiming] = []
    try:
        with telling(console) as tell:
            for row in measure(wanted, sorted(set(options.ranks)), sizes, options.turns, tell):
                rows.append(row)
    finally:  # also of those that are measured where another fails, or Ctrl-C ends it
        if rows:
            console.print(table(rows))
            if options.out:
                write(rows, options.out)
            if options.plot:
                write_whole(options.plot, plot(rows))
    return 0
