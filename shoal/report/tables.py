"""Tables without lines for the terminal, and tables and tiles for pages."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from html import escape
from io import StringIO
from itertools import zip_longest
from shutil import get_terminal_size

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.terminal import printable

UNLIMITED = 10_000  # width of a table that is not printed on a terminal


def text_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "", words: Collection[int] = (0,),
    gap: int = 2, lines: bool = False, width: int | None = None,
) -> Table:  # fmt: skip
    """Return a table for the terminal.

    Args:
        rows: plain text, or text with a style; an empty row is a gap (with ``lines`` a line) between two groups.
        words: columns to align to the left; all others are numbers, aligned to the right.
        gap: spaces between columns.
        lines: draw lines between columns.
        width: characters of a line (default: the terminal's). Without lines, cells break between words if they can.
    """
    table = Table(
        title=title and Text(printable(title)), title_justify="left", title_style="bold", header_style="bold",
        box=box.HEAVY_HEAD if lines else None, pad_edge=lines, padding=(0, 1) if lines else (0, gap, 0, 0),
        show_header=any(headings),
    )  # fmt: skip
    rows = [*rows]
    widths = [] if lines else _fit_columns(headings, rows, width or get_terminal_size().columns, gap)
    for i, heading in enumerate(headings):
        table.add_column(
            Text(printable(heading)), justify="left" if i in words else "right", overflow="fold",
            width=widths[i] if widths else None,
        )  # fmt: skip
    for row in rows:
        if row:
            table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
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


def _fit_columns(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], width: int, gap: int) -> list[int]:
    """Return widths of columns in which all text wraps between words only; [] if they need more than ``width``.

    The narrowest columns grow first, so that most numbers keep their units beside them.
    """
    every = zip_longest(headings, *filter(None, rows), fillvalue="")
    columns = [[printable(str(cell)) for cell in cells] for cells in every]
    longest = [max(map(cell_len, column)) for column in columns]
    widths = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
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
