"""Parts that the pages of estimates and plans share: tables, and bars that are made of pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from shoal.report.charts import draw_bars, new_figure, to_svg
from shoal.report.page import Fragment, page

WIDTH = 860


def write(path: Path, title: str, lead: str, parts: Iterable[str]) -> None:
    """Write a page of these parts, which are markup, as one file."""
    path.write_text(page(title, lead, [Fragment(part) for part in parts]), encoding="utf-8")


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return the markup of a table of plain text."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    body = "".join(line(cells, "td") for cells in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def stacked_bars(
    names: Sequence[str], bars: Sequence[tuple[str, Sequence[float], str]], limit: tuple[float, str] | None = None
) -> str:
    """Return the SVG of horizontal bars with a legend; the arguments are those of `draw_bars`."""
    figure, (axes,) = new_figure(WIDTH, 90 + 30 * len(bars))
    draw_bars(axes, names, bars, limit)
    return to_svg(figure, inline=True)
