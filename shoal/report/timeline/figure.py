"""Timelines as a figure for a paper: one geometry, written as SVG or as PNG.

Lengths are in points (1/72 inch): a two-column page is 504 wide, one column 240.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from shoal.base.files import write_atomically
from shoal.report.svg import INK
from shoal.report.timeline.chart import Chart, axis, has_shades, legend
from shoal.report.timeline.palette import WHITE, colour, ink

PAGE = 504.0  # the text width of a US letter page with one-inch margins is 468; two-column styles have 504
MARGIN = 3.0
FONT = 7.0  # minimum font size accepted by journals
DIGIT = 0.56  # width of a digit, in font sizes (Helvetica)
GROUND, RULE, SOFT = "#f1f3f5", "#c4cad1", "#4c5560"
DPI = 300
HALVES = ((0.0, 1.0), (0.0, 0.5), (0.5, 0.5))  # offset and height of an action in its lane, by `Chart.half`


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle; `title` is its meaning, "" for decoration."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text whose baseline starts, is centred or ends at (x, y)."""

    x: float
    y: float
    text: str
    size: float = FONT
    fill: str = INK
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Figure:
    """Shapes to draw, in order."""

    width: float
    height: float
    marks: tuple[Rectangle | Label, ...]


def figure(charts: Sequence[Chart], *, width: float = PAGE) -> Figure:
    """Lay out timelines above each other on one time axis, with a legend.

    Args:
        charts: charts whose times are all in the same unit.
        width: width of the figure [pt].
    """
    end = max(chart.timeline.step_time for chart in charts) or 1.0
    most = max(chart.timeline.ranks for chart in charts)
    left = MARGIN + FONT * (DIGIT * len(str(most - 1)) + 2.6)
    plot = width - left - MARGIN
    lane = max(2.0, min(11.0, 150 / most))
    marks: list[Rectangle | Label] = []
    y = 0.0
    for chart in charts:
        y += 11 if y else MARGIN + 7
        marks.append(Label(MARGIN, y, chart.name, 8, bold=True))
        marks.append(Label(width - MARGIN, y, chart.caption(), fill=SOFT, anchor="end"))
        y += 3.5
        marks += _lanes(chart, left, y, plot / end, lane, end)
        y += chart.timeline.ranks * lane
    marks += _axis(left, y, plot, end, seconds=charts[0].seconds)
    entries, bottom = _legend(charts, y + 21, width)
    return Figure(width, bottom, (*marks, *entries))


def _lanes(chart: Chart, left: float, top: float, per_time: float, lane: float, end: float) -> list[Rectangle | Label]:
    timeline = chart.timeline
    columns, bar = timeline.columns, lane - min(1.5, lane * 0.15)
    digits = len(str(columns.microbatch.max(initial=0)))
    size = min(6.5, bar * 0.75)
    every = -(-FONT * 1.15 // lane)
    marks: list[Rectangle | Label] = []
    for rank in range(timeline.ranks):
        y = top + rank * lane
        if rank % every == 0:
            text = f"rank {rank}" if rank == 0 else str(rank)
            marks.append(Label(left - 3, y + bar / 2 + FONT * 0.36, text, anchor="end", fill=SOFT))
        marks.append(Rectangle(left, y, end * per_time, bar, GROUND))
        for row in range(columns.offset[rank], columns.offset[rank + 1]):
            begin, length = float(chart.start[row]), float(chart.end[row] - chart.start[row])
            x, width = left + begin * per_time, length * per_time
            fill = colour(chart.paints[chart.paint[row]])
            seam = 0.35 if width > 2 else 0.0
            down, part = HALVES[chart.half[row]]
            box = Rectangle(x, y + down * bar, max(width - seam, 0.05), part * bar, fill, str(columns.action(row)))
            marks.append(box)
            microbatch = int(columns.microbatch[row])
            if microbatch >= 0 and size >= 4.5 and width >= (digits + 0.5) * DIGIT * size:
                centre = x + (width - seam) / 2
                middle = box.y + box.height / 2
                own = min(size, box.height)
                marks.append(Label(centre, middle + own * 0.36, str(microbatch), own, ink(fill), "middle"))
    return marks


def _axis(left: float, y: float, plot: float, end: float, *, seconds: bool) -> list[Rectangle | Label]:
    unit, numbers = axis(end, int(plot / 45), seconds=seconds)
    marks: list[Rectangle | Label] = [Rectangle(left, y + 1.5, plot, 0.5, RULE)]
    for share, number in numbers:
        x = left + share * plot
        marks.append(Rectangle(x - 0.25, y + 1.5, 0.5, 3, RULE))
        marks.append(Label(x, y + 11.5, number, fill=SOFT, anchor="middle"))
    return [*marks, Label(left - 6, y + 11.5, unit, fill=SOFT, anchor="end")]


def _legend(charts: Sequence[Chart], y: float, width: float) -> tuple[list[Rectangle | Label], float]:
    """Return the legend's shapes, and the y coordinate of its end."""
    entries = [(colour(paint), name) for paint, name in legend(charts)]
    if has_shades(charts):
        entries.append(("", "lighter: a later stage of the rank"))
    marks: list[Rectangle | Label] = []
    x = MARGIN
    for fill, name in entries:
        needed = (10 if fill else 0) + len(name) * FONT * 0.5 + 9
        if x > MARGIN and x + needed > width:
            x, y = MARGIN, y + 10
        if fill:
            marks.append(Rectangle(x, y - 5.8, 7, 7, fill))
        marks.append(Label(x + (10 if fill else 0), y, name, fill=SOFT))
        x += needed
    return marks, y + MARGIN + 2


def write_figure(path: Path, charts: Sequence[Chart]) -> None:
    """Write a figure as SVG or PNG, by the file name's suffix."""
    drawn = figure(charts)
    if path.suffix == ".svg":
        write_atomically(path, svg(drawn))
    else:
        content = io.BytesIO()
        png(drawn).save(content, "PNG", dpi=(DPI, DPI), optimize=True)
        write_atomically(path, content.getvalue())


def svg(drawn: Figure) -> str:
    """Render a figure as SVG of its true size, with a tooltip for each action."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawn.width:g}pt" height="{drawn.height:g}pt" '
        f'viewBox="0 0 {drawn.width:g} {drawn.height:g}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="100%" height="100%" fill="{WHITE}"/>',
    ]
    for mark in drawn.marks:
        if isinstance(mark, Rectangle):
            size = f'width="{mark.width:.2f}" height="{mark.height:.2f}"'
            box = f'<rect x="{mark.x:.2f}" y="{mark.y:.2f}" {size} fill="{mark.fill}"'
            lines.append(f"{box}><title>{escape(mark.title)}</title></rect>" if mark.title else f"{box}/>")
        else:
            anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
            bold = ' font-weight="bold"' if mark.bold else ""
            lines.append(
                f'<text x="{mark.x:.2f}" y="{mark.y:.2f}" font-size="{mark.size:g}" fill="{mark.fill}"{anchor}{bold}>'
                f"{escape(mark.text)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def png(drawn: Figure) -> Image.Image:
    dots = DPI / 72
    image = Image.new("RGB", (round(drawn.width * dots), round(drawn.height * dots)), WHITE)
    pen = ImageDraw.Draw(image)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for mark in drawn.marks:
        if isinstance(mark, Rectangle):
            left, top = round(mark.x * dots), round(mark.y * dots)
            right, bottom = round((mark.x + mark.width) * dots), round((mark.y + mark.height) * dots)
            pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=mark.fill)
        else:
            font = ImageFont.load_default(mark.size * dots)
            stroke = mark.size * dots / 40 if mark.bold else 0
            where, anchor = (mark.x * dots, mark.y * dots), anchors[mark.anchor]
            pen.text(where, mark.text, mark.fill, font, anchor, stroke_width=stroke, stroke_fill=mark.fill)
    return image
