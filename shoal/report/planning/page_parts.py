"""Parts that the pages of estimates and plans share: tables, and bars that are made of pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from shoal.report.page import Fragment, page
from shoal.report.svg import FAINT, INK, Canvas

COLOURS = (
    "#4a7fc1", "#2f9488", "#8c7fb8", "#e79245", "#f1c667", "#cb5a3c", "#c3618d", "#6f7c91", "#a3b86c", "#b08968",
    "#7aa5b8", "#c9ced6",
)  # fmt: skip
WIDTH, ROW, BAR = 860, 30, 22


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
    title: str, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float], str]], most: float, *,
    left: int = 90, limit: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """Draw bars of named pieces under a legend; pieces that no bar has are left out.

    Args:
        bars: of each its label, the sizes of its pieces, and the text after its end.
        most: the size that fills the width.
        left: pixels for the labels.
        limit: a size to mark, and what it is.
    """
    canvas, scale = Canvas(), (WIDTH - left - 80) / most
    shown = [i for i in range(len(names)) if any(sizes[i] > 0 for _, sizes, _ in bars)]
    for place, i in enumerate(shown):
        x, y = 10 + place % 3 * 280, 8 + place // 3 * 18
        canvas.add("rect", x=x, y=y, width=11, height=11, fill=COLOURS[i])
        canvas.text(x + 16, y + 10, names[i])
    y = top = 16 + -(-len(shown) // 3) * 18
    for label, sizes, end in bars:
        canvas.text(left - 8, y + 15, label, anchor="end", size=11)
        begin = float(left)
        for i in shown:
            canvas.add("rect", x=begin, y=y, width=sizes[i] * scale, height=BAR, fill=COLOURS[i])
            begin += sizes[i] * scale
        canvas.text(begin + 6, y + 15, end, size=11)
        y += ROW
    if limit:
        at = left + limit[0] * scale
        canvas.add("line", x1=at, x2=at, y1=top - 4, y2=y, stroke=INK, stroke_dasharray="4 3")
        canvas.text(at - 4, y + 12, limit[1], anchor="end", fill=FAINT)
    return canvas.document(WIDTH, y + 20, title)
