"""Tables without lines for the terminal, and tables and tiles for pages."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from html import escape
from io import StringIO
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.terminal import join_units, printable, wrap_words

UNLIMITED = 10_000  # width of a table that is not printed on a terminal


def text_table(
    headings: Sequence[str | Text], rows: Iterable[Sequence[str | Text]], *, title: str = "",
    words: Collection[int] = (0,), gap: int = 2, lines: bool = False, width: int | None = None,
) -> Table:  # fmt: skip
    """Return a table for the terminal.

    Args:
        rows: plain text, or text with a style; an empty row is a gap (with ``lines`` a line) between two groups.
        words: columns to align to the left; all others are numbers, aligned to the right.
        gap: spaces between columns.
        lines: draw lines between columns.
        width: characters of a line (default: the terminal's). Without lines, cells break between words if they can, and
            a table too wide for that has its rows side by side, if these fit.
    """
    rows, widths = [*rows], list[int]()
    if not lines:
        width = width or get_terminal_size().columns
        widths = _fit_columns(headings, rows, width, gap)
        if not widths and any(headings):
            turned = [*zip_longest(headings, *filter(None, rows), fillvalue="")]
            if widths := _fit_columns(turned[0], turned[1:], width, gap):
                headings, rows, words = turned[0], turned[1:], range(len(turned[0]))
        widths = widths or _fit_columns(headings, rows, width, gap, part_units=True)
    table = Table(
        title=title and Text(printable(title)), title_justify="left", title_style="bold", header_style="bold",
        box=box.HEAVY_HEAD if lines else None, pad_edge=lines, padding=(0, 1) if lines else (0, gap, 0, 0),
        show_header=any(headings),
    )  # fmt: skip
    for i, (heading, size) in enumerate(zip_longest(headings, widths)):
        justify: Literal["left", "right"] = "left" if i in words else "right"
        table.add_column(_wrap(heading, size or UNLIMITED), justify=justify, overflow="fold", width=size)
    for row in rows:
        if row:
            table.add_row(*map(_wrap, row, widths or [UNLIMITED] * len(row)))
        else:
            table.add_section()
    return table


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: int | None = None) -> list[str]:
    """Format a table as lines of text. On a terminal, wide columns and all headings wrap to its width.

    Args:
        right: index of the first column to align to the right; None for none.
    """
    words = range(len(headings) if right is None else right)
    width = get_terminal_size().columns - 1 if sys.stdout.isatty() else UNLIMITED
    rows = [*rows]
    gap = next((gap for gap in (2, 1) if _fit_columns(headings, rows, width, gap)), 2)
    table = text_table(headings, rows, words=words, gap=gap, width=width)
    output = StringIO()
    console = Console(file=output, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(table)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def _wrap(cell: str | Text, width: int) -> Text:
    if isinstance(cell, Text):
        return cell
    lines = printable(cell).split("\n")
    return Text("\n".join("\n".join(wrap_words(line, width)) if cell_len(line) > width else line for line in lines))


def _fit_columns(
    headings: Sequence[str | Text], rows: Iterable[Sequence[str | Text]], width: int, gap: int, *,
    part_units: bool = False,
) -> list[int]:  # fmt: skip
    """Return widths of columns in which all text wraps between words only; [] if they need more than ``width``.

    The narrowest columns grow first.

    Args:
        part_units: a number and its unit may be on two lines.
    """
    every = zip_longest(headings, *filter(None, rows), fillvalue="")
    columns = [[line for cell in cells for line in printable(str(cell)).split("\n")] for cells in every]
    longest = [max(map(cell_len, column)) for column in columns]
    if not part_units:
        columns = [[join_units(line) for line in column] for column in columns]
    widths = [max(cell_len(word) for line in column for word in line.split(" ")) for column in columns]
    while (spare := width - sum(widths) - gap * (len(widths) - 1)) > 0 and widths != longest:
        _, narrowest = min((size, i) for i, size in enumerate(widths) if size < longest[i])
        widths[narrowest] += 1
    return widths if spare >= 0 else []


def html_table(
    rows: Iterable[Sequence[str]], headings: Sequence[str] = (), *, best: tuple[int, int] | None = None
) -> str:
    """Return the markup of a table of plain text.

    Args:
        best: row and column of a cell to emphasise.
    """
    parts = ['<div class="scroll"><table>']
    if headings:
        parts += ["<thead><tr>", *(f'<th scope="col">{escape(cell)}</th>' for cell in headings), "</tr></thead>"]
    parts.append("<tbody>")
    for i, row in enumerate(rows):
        cells = (f"<td{' class=best' if (i, j) == best else ''}>{escape(cell)}</td>" for j, cell in enumerate(row))
        parts += ["<tr>", *cells, "</tr>"]
    return "".join([*parts, "</tbody></table></div>"])


def html_tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Return the markup of facts, each a (name, value), as large values over their names."""
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts)
    return f'<div class="answer">{tiles}</div>'
