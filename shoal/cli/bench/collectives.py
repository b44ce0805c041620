"""`shoal bench collectives`: the table, as CSV and as a plot."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_place, write_whole
from shoal.base.section import NonEmpty, Section
from shoal.base.units import BYTES, parse, show_bytes, show_seconds
from shoal.labs.bench.collectives import BACKEND, CollectiveTiming, measure
from shoal.labs.bench.progress import telling
from shoal.labs.collectives.description import Collective
from shoal.report.lines import lines
from shoal.report.svg import FAINT, Canvas

WIDTH, HEIGHT = 560.0, 330.0  # of one chart
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


def collectives(options: CollectivesOptions, console: Console) -> int:
    """Measure, print, write and draw.

    Raises:
        UsageError: bad options.
    """
    wanted = _wanted(options.only)
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


def _wanted(only: str) -> list[Collective]:
    if only == "all":
        return list(Collective)
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in list(Collective):
            near = did_you_mean(name, Collective)
            raise UsageError(f"bench collectives --only {only}: there is no collective '{name}'; {near}")
    return [Collective(name) for name in names]


def table(rows: list[CollectiveTiming]) -> Table:
    """Bus bandwidths and times, the fastest of ours in bold."""
    shown = Table(title="collectives: the backend's own beside algorithms over point-to-point transfers")
    for column in ("collective", "ranks", "S", "algorithm"):
        shown.add_column(column)
    for column in ("time", "bus", "x backend's time"):
        shown.add_column(column, justify="right")
    for i, row in enumerate(rows):
        race = [r for r in rows if _race(r) == _race(row) and r.algorithm != BACKEND]
        style = "dim" if row.algorithm == BACKEND else "bold" if row == min(race, key=lambda r: r.seconds) else ""
        shown.add_row(
            row.collective, str(row.ranks), show_bytes(row.size), row.algorithm, show_seconds(row.seconds),
            f"{show_bytes(row.bus)}/s", f"{row.ratio:.2f}", style=style,
            end_section=i + 1 == len(rows) or _race(rows[i + 1]) != _race(row),
        )
    return shown


def _race(row: CollectiveTiming) -> tuple[str, int, int]:
    return row.collective, row.ranks, row.size


def write(rows: list[CollectiveTiming], out: Path) -> None:
    """The table as CSV: bytes, seconds, bytes/s."""
    text = io.StringIO()
    writer = csv.DictWriter(text, asdict(rows[0]))
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_whole(out, text.getvalue())


def plot(rows: list[CollectiveTiming]) -> str:
    """Bus bandwidth over size, a chart for each collective and number of ranks, as an SVG file."""
    ranks = sorted({row.ranks for row in rows})
    names = list(dict.fromkeys(row.collective for row in rows))
    canvas = Canvas()
    canvas.text(30, 40, "Bus bandwidth of collectives", size=21, font_weight=650)
    words = "in nccl-tests' definition; median of turns; backend's own dashed"
    canvas.text(30, 62, words, size=13, fill=FAINT)
    for y, name in enumerate(names):
        for x, n in enumerate(ranks):
            of_race = [row for row in rows if (row.collective, row.ranks) == (name, n)]
            if not of_race:  # it was not measured any more
                continue
            series: dict[str, list[tuple[float, float]]] = {}
            for row in of_race:
                series.setdefault(row.algorithm, []).append((row.size, row.bus))
            chart = lines(
                f"{name} on {n} ranks", series, width=WIDTH, height=HEIGHT, dots=True, dashed=frozenset({BACKEND}),
                x=("S", show_bytes), y=("", lambda bus: f"{show_bytes(bus)}/s"),
            )
            canvas.place(30 + x * (WIDTH + 30), 90 + y * (HEIGHT + 30), chart)
    return canvas.document(
        30 + len(ranks) * (WIDTH + 30), 100 + len(names) * (HEIGHT + 30), "Bus bandwidth of collectives"
    )
