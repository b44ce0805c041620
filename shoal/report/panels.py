"""Small line charts side by side on the same linear axes: what many ways of doing one thing have in common, and where
they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from shoal.report.lines import COLOURS
from shoal.report.svg import FAINT, GRID, INK, Canvas
from shoal.report.timeline.chart import ticks

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 430.0, 290.0, 48.0, 46.0, 40.0, 14.0
COLUMNS = 2
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: above it.
        series: by name, the lines of one thing: the first is drawn thick, the others thin beside it.
        grey: the names that are drawn grey, to compare with.
    """

    title: str
    series: Mapping[str, Sequence[Points]]
    grey: frozenset[str] = field(default_factory=frozenset)


def with_mean(lines: Sequence[Points]) -> list[Points]:
    """The mean of some lines as far as all of them go, and the lines.

    >>> with_mean([[(1, 4.0), (2, 2.0)], [(1, 2.0), (2, 0.0)]])[0]
    [(1.0, 3.0), (2.0, 1.0)]
    """
    together = zip(*lines, strict=False)
    return [[(fmean(x for x, _ in points), fmean(y for _, y in points)) for points in together], *lines]


def panels(title: str, charts: Sequence[Panel], *, x: str, y: str, highest: float | None = None) -> str:
    """The charts as one SVG.

    Args:
        x, y: titles of the axes.
        highest: y above it is cut off. What is not finite is left out.
    """
    points = [point for chart in charts for lines in chart.series.values() for line in lines for point in line]
    heights = [p[1] for p in points if isfinite(p[1])] or [0.0]
    right, low = max(p[0] for p in points), min(heights)
    high = max(heights) if highest is None or not isfinite(highest) else highest
    if high <= low:  # all points lie on one line, or above what is shown
        high = low + 1.0
    page = Canvas()
    page.text(8, 20, title, size=15, font_weight=600)
    for i, chart in enumerate(charts):
        row, column = divmod(i, COLUMNS)
        page.place(column * WIDTH + 8, row * HEIGHT + 28, _panel(chart, right, low - 0.04 * (high - low), high, x, y))
    rows = -(-len(charts) // COLUMNS)
    return page.document(min(COLUMNS, len(charts)) * WIDTH + 16, rows * HEIGHT + 36, title)


def _panel(chart: Panel, last: float, low: float, high: float, x: str, y: str) -> Canvas:
    canvas = Canvas()
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(px: float, py: float) -> tuple[float, float]:
        return (
            LEFT + px / last * (right - LEFT),
            bottom - (min(py, high) - low) / (high - low) * (bottom - TOP),
        )

    canvas.text(LEFT, 18, chart.title, size=13, font_weight=600)
    for value in ticks(low, high, 5):
        _, py = at(0, value)
        canvas.add("path", d=f"M{LEFT} {py:.1f} H{right}", stroke=GRID)
        canvas.text(LEFT - 6, py + 4, f"{value:g}", size=11, fill=FAINT, anchor="end")
    for value in ticks(0.0, last, 6):
        canvas.text(at(value, low)[0], bottom + 15, f"{value:g}", size=11, fill=FAINT, anchor="middle")
    canvas.add("path", d=f"M{LEFT} {TOP} V{bottom} H{right}", stroke=FAINT, fill="none")
    canvas.text((LEFT + right) / 2, bottom + 31, x, size=11.5, fill=FAINT, anchor="middle")
    canvas.text(LEFT, TOP - 8, y, size=11.5, fill=FAINT)
    coloured = [name for name in chart.series if name not in chart.grey]
    for row, (name, lines) in enumerate(chart.series.items()):
        colour = FAINT if name in chart.grey else COLOURS[coloured.index(name)]
        for i, line in enumerate(lines):
            shown = [point for point in line if low <= point[1] <= high]
            if not shown:
                continue
            path = "M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in (at(*point) for point in shown))
            style = {"stroke_width": 2.2} if i == 0 else {"stroke_width": 0.8, "opacity": 0.45}
            dash = {"stroke_dasharray": "5 4"} if name in chart.grey and i == 0 else {}
            canvas.add("path", d=path, fill="none", stroke=colour, stroke_linejoin="round", **style, **dash)
            if i == 0:
                px, py = at(*shown[-1])
                canvas.add("circle", cx=px, cy=py, r=3.6, fill=colour)
        key = TOP + 12 + 16 * row
        canvas.add("path", d=f"M{right - 118} {key - 4} h20", stroke=colour, stroke_width=3)
        canvas.text(right - 92, key, name, size=11.5, fill=INK)
    return canvas
