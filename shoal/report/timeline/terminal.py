"""Timelines in a terminal: one row per rank, one cell per time interval; in colour, or as characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shoal.base.terminal import printable
from shoal.report.tables import text_table
from shoal.report.timeline.chart import Chart, axis, has_shades, legend, table
from shoal.report.timeline.palette import BLACK, Paint, colour, ink, mix

IDLE = -1
MOST_ROWS = 32  # maximum ranks shown; of more, the first and the last


def show(console: Console, charts: Sequence[Chart], *, rows: int = MOST_ROWS) -> None:
    """Print timelines above each other on one time axis, and a table that compares them.

    Args:
        console: console whose width they fit. Without colour (a pipe, ``NO_COLOR``) actions are shown by their program
            characters, in lower case for every second stage of a rank.
        charts: charts whose times are all in the same unit.
        rows: maximum number of ranks shown per timeline.
    """
    width = console.width
    end = max(chart.timeline.step_time for chart in charts)
    for chart in charts:
        versions = chart.timeline.weight_versions.max()
        more = f", {versions} versions of the weights" if versions > 1 else ""
        _print(console, f"{chart.name}: {chart.caption()}{more}", style="bold")
        for line in timeline(chart, width, end, rows=rows, coloured=_coloured(console)):
            console.print(line, no_wrap=True, overflow="crop", crop=True)
        _print(console, "")
    _print_legend(console, charts)
    if len(charts) > 1:
        console.print(comparison(charts, width))


def timeline(chart: Chart, width: int, end: float, *, rows: int = MOST_ROWS, coloured: bool = True) -> list[Text]:
    """Return the rows of one timeline, with its time axis below them."""
    label = len(f"{chart.lane} {chart.timeline.ranks - 1}") + 1
    idle = 1 - chart.timeline.busy[chart.kind] / chart.timeline.compute_span if chart.timeline.compute_span else None
    notes = [f" {100 * share:3.0f}% idle" for share in idle] if idle is not None and width >= 72 else None
    cells = max(1, width - label - (len(notes[0]) if notes else 0))
    lines = []
    for rank in _shown(chart.timeline.ranks, rows):
        if rank is None:
            hidden = chart.timeline.ranks - rows + 1
            lines.append(Text(f"{'':{label}}... {hidden} more ranks ..."[:width], style="dim"))
            continue
        line = Text(f"{chart.lane} {rank}".ljust(label), style="dim" if coloured else "")
        line.append_text(_cells(chart, rank, cells, end, coloured=coloured))
        if notes:
            line.append(notes[rank], style="dim")
        line.truncate(width)
        lines.append(line)
    return [*lines, _axis(label, cells, end, seconds=chart.seconds, width=width)]


def _shown(ranks: int, rows: int) -> list[int | None]:
    """Return the ranks to draw, with None for omitted ranks in between."""
    if ranks <= rows:
        return list(range(ranks))
    first = rows // 2
    return [*range(first), None, *range(ranks - (rows - 1 - first), ranks)]


def _cells(chart: Chart, rank: int, cells: int, end: float, *, coloured: bool) -> Text:
    columns, line = chart.timeline.columns, Text()
    digits = len(str(columns.microbatch.max(initial=0)))  # of the longest number: all fit, or none is written
    row_of = fill(chart, rank, cells, end)
    begin = 0
    for cell in range(1, cells + 1):
        if cell < cells and row_of[cell] == row_of[begin]:
            continue
        row, length = int(row_of[begin]), cell - begin
        begin = cell
        if row == IDLE:
            line.append((" " if coloured else ".") * length, Style(bgcolor="grey15") if coloured else "")
            continue
        microbatch = str(columns.microbatch[row]) if columns.microbatch[row] >= 0 else ""
        paint = chart.paints[chart.paint[row]]
        if coloured:
            text = microbatch if digits <= length else ""
            ground = colour(paint)
            if columns.microbatch[row] % 2:  # distinguish neighbouring micro-batches slightly
                ground = mix(ground, BLACK, 0.07)
            line.append(text.center(length), Style(color=ink(ground), bgcolor=ground))
        else:
            letter = _letter(paint)
            text = letter + microbatch if digits + 2 <= length else letter
            line.append(text.ljust(length, "-"))
    return line


def fill(chart: Chart, rank: int, cells: int, end: float) -> np.ndarray:
    """Return the row of the timeline's columns that fills most of each cell, or `IDLE`. [cells]

    Each cell is 1/cells of the time to ``end``.
    """
    begin, last = chart.timeline.columns.offset[rank], chart.timeline.columns.offset[rank + 1]
    busy = np.zeros(cells)
    most, row_of = np.zeros(cells), np.full(cells, IDLE)
    for row in range(begin, last):
        left, right = (float(t[row]) / end * cells if end else 0.0 for t in (chart.start, chart.end))
        inside = np.arange(int(left), min(cells, int(np.ceil(right))))
        share = np.minimum(right, inside + 1) - np.maximum(left, inside)
        more = share > most[inside] + 1e-9
        most[inside[more]], row_of[inside[more]] = share[more], row
        busy[inside] += share
    row_of[busy < 0.5] = IDLE
    return row_of


def _letter(paint: Paint) -> str:
    """Return the letter of an action: lower case on a later stage of its rank, and in a second copy of the model."""
    return str(paint.op).lower() if paint.shade or paint.copy else str(paint.op)


def _axis(label: int, cells: int, end: float, *, seconds: bool, width: int) -> Text:
    unit, numbers = axis(end, cells // 12, seconds=seconds)
    line = [" "] * (label + cells)
    line[: len(unit)] = unit
    for share, text in numbers:
        at = label + min(round(share * cells), cells - len(text))
        if at >= label and all(c == " " for c in line[max(0, at - 1) : at + len(text) + 1]):
            line[at : at + len(text)] = text
    return Text("".join(line).rstrip()[:width], style="dim")


def _print_legend(console: Console, charts: Sequence[Chart]) -> None:
    coloured = _coloured(console)
    entries = []
    for paint, name in legend(charts):
        if coloured:
            entries.append(Text.assemble(("  ", Style(bgcolor=colour(paint))), f" {name}"))
        else:
            entries.append(Text(f"{_letter(paint)} {name}"))
    entries.append(Text.assemble(("  ", Style(bgcolor="grey15")), " idle") if coloured else Text(". idle"))
    console.print(Columns(entries, padding=(0, 3)))
    if has_shades(charts):
        _print(console, f"{'lighter' if coloured else 'lower case'}: a later stage of the rank")


def comparison(charts: Sequence[Chart], width: int) -> Table:
    """Return a table with a row for each timeline, transposed if the rows would be wider than the terminal."""
    headings, rows = table(charts)
    wide = sum(3 + max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True))
    if wide > width:
        headings, *rows = [list(column) for column in zip(headings, *rows, strict=True)]
    return text_table(headings, rows)


def _coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style), overflow="fold")
