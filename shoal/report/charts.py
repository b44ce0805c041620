"""Charts drawn with matplotlib, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from math import ceil
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from shoal.report.timeline.palette import FAINT, GROUND, INK, ink

Points = Sequence[tuple[float, float]]
Axis = tuple[str, Callable[[float], str]]
"""Title of an axis, and the formatter of its numbers."""

COLOURS = (
    "#2563eb", "#e07b1a", "#0f9d76", "#c026a8", "#7c5cd6", "#b3261e", "#0891b2", "#8a6d1a", "#4b5563", "#5b3f8c",
    "#7fae3c", "#1f4e79", "#a0522d", "#33a1c9", "#d4a5a5", "#3c6e47",
)  # fmt: skip
PAGE_WIDTH = 860
"""Width of a chart on a page, in CSS pixels."""

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "shoal", "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT, "grid.alpha": 0.25,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "lines.linewidth": 1.8, "lines.markersize": 4, "legend.fontsize": 8.5,
}  # fmt: skip
styled = matplotlib.rc_context(STYLE)
"""Decorator of functions that draw: applies `STYLE` only inside them, so that the user's settings are unchanged."""


@styled
def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, title: str = "", shared: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure of equal charts. Returns it and its axes, row by row.

    Args:
        width, height: in CSS pixels.
        shared: give all charts the same axes.
    """
    figure = Figure(figsize=(width / 96, height / 96), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure, [*figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flat]


@styled
def to_svg(figure: Figure, *, inline: bool = False, title: str = "") -> str:
    """Return the figure as an SVG element.

    Args:
        inline: for use in a page: without a background, and in the page's own colours of text and ground.
        title: accessible name.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=inline, metadata={"Date": None})
    named = f'<svg role="img" aria-label="{escape(title)}" ' if title else "<svg "
    text = file.getvalue().replace("<svg ", named, 1).replace(" \n", " ")  # a path in one line, not one a point
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    colours = {INK: "currentColor", FAINT: "currentColor", GROUND: "var(--ground)"} if inline else {}
    for colour, own in colours.items():
        text = text.replace(colour, own)
    return text


@styled
def draw_lines(
    axes: Axes,
    title: str,
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    dashed: frozenset[str] = frozenset(),
    marks: Sequence[tuple[float, float, str]] = (),
    dots: bool = False,
    from_zero: bool = False,
    lowest: float | None = None,
    legend: str = "",
) -> None:
    """Draw lines over a logarithmic x axis, with a legend.

    Args:
        series: points by name, in rising x; all positive.
        dashed: names of the lines to draw dashed and grey.
        marks: points (x, y) to emphasise, each with a label.
        dots: draw the points, too.
        from_zero: make y linear, from 0; otherwise it is logarithmic.
        lowest: where a logarithmic y starts, if lower than all points.
        legend: title of the legend.
    """
    axes.set_title(title)
    axes.set_xscale("log")
    colours = cycle(COLOURS)
    for name, points in series.items():
        colour, line = (FAINT, "--") if name in dashed else (next(colours), "-")
        axes.plot(*zip(*points, strict=True), line, color=colour, marker="o" if dots else "", label=name)
    for at, height, label in marks:
        axes.plot([at], [height], "o", color=INK, markerfacecolor=GROUND)
        axes.annotate(label, (at, height), xytext=(0, 7), textcoords="offset points", ha="center", weight="bold",
                      bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.5, "alpha": 0.8})
    if from_zero:  # with space for the labels of marks below the title
        axes.set_ylim(0, max([axes.get_ylim()[1], *(1.12 * height for _, height, _ in marks)]))
    else:
        axes.set_yscale("log")
        axes.set_ylim(lowest, max([axes.get_ylim()[1], *(1.5 * height for _, height, _ in marks)]))
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(_locate_powers(bottom, top))
    for axis, (label, show) in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_label_text(label)
        axis.set_major_formatter(FuncFormatter(lambda value, _, show=show: show(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title=legend, alignment="left")


def _locate_powers(low: float, high: float) -> LogLocator:
    """Place ticks at powers of ten; over less than three of them at 2 and 5 times each, too."""
    return LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))


@styled
def draw_means(
    axes: Axes, title: str, series: Mapping[str, Sequence[Points]], *, grey: Sequence[str], x: str, y: str
) -> None:
    """Draw curves on linear axes: the mean of each name's lines thick, the lines themselves thin."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    colours = cycle(COLOURS)
    for name, lines in series.items():
        colour = FAINT if name in grey else next(colours)
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.5)
        mean = mean_line(lines)
        axes.plot(*zip(*mean, strict=True), "--" if name in grey else "-", color=colour, label=name)
    axes.legend(loc="upper right")


def mean_line(lines: Sequence[Points]) -> list[tuple[float, float]]:
    """Return the mean of several lines, up to the end of the shortest.

    >>> mean_line([[(1, 4.0), (2, 2.0)], [(1, 2.0), (2, 0.0)]])
    [(1.0, 3.0), (2.0, 1.0)]
    """
    together = zip(*lines, strict=False)
    return [(sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)) for points in together]


@styled
def draw_bars(
    axes: Axes, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float], str]],
    limit: tuple[float, str] | None = None,
) -> None:  # fmt: skip
    """Draw horizontal bars made of named parts; parts that no bar has are left out.

    Args:
        bars: label, sizes of the parts, and text after the end of each bar, from the top.
        limit: a size to mark, and its label.
    """
    labels, sizes, ends = zip(*bars, strict=True)
    shown = [name for i, name in enumerate(names) if any(each[i] for each in sizes)]
    rows = range(len(bars))
    colours = cycle(COLOURS)
    begin = [0.0] * len(bars)
    for i, name in enumerate(names):
        part = [each[i] for each in sizes]
        if any(part):
            axes.barh(rows, part, left=begin, height=0.7, color=next(colours), label=name)
            begin = [a + b for a, b in zip(begin, part, strict=True)]
    behind = {"facecolor": GROUND, "edgecolor": "none", "pad": 1} if limit else None  # the limit may cross the text
    for row, (end, text) in enumerate(zip(begin, ends, strict=True)):
        axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", bbox=behind)
    if limit:
        axes.axvline(limit[0], color=INK, linestyle="--", linewidth=1)
        axes.annotate(limit[1], (limit[0], len(bars) - 0.5), xytext=(-3, -12), textcoords="offset points", ha="right",
                      annotation_clip=False)
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    hide_frame(axes)
    axes.margins(x=0.12)
    if len(names) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=_legend_columns(shown, labels))  # below a title


def _legend_columns(names: Sequence[str], labels: Sequence[str]) -> int:
    """Return how many columns of a legend fit beside the labels of bars, at most 3, at 7 CSS pixels a letter."""
    beside = PAGE_WIDTH - 7 * max(len(line) for label in labels for line in label.split("\n"))
    return min(3, max(1, beside // (45 + 7 * max(map(len, names)))))


def stacked_bars(
    names: Sequence[str], bars: Sequence[tuple[str, Sequence[float], str]], limit: tuple[float, str] | None = None,
    *, title: str = "", height: int = 30,
) -> str:  # fmt: skip
    """Draw bars with `draw_bars` as SVG: for a page, or with a title as a file; ``height`` is of a bar [CSS pixels]."""
    labels, sizes, _ = zip(*bars, strict=True)
    shown = [name for i, name in enumerate(names) if any(each[i] for each in sizes)]
    rows = ceil(len(shown) / _legend_columns(shown, labels))
    figure, (axes,) = new_figure(PAGE_WIDTH, 45 + 15 * max(3, rows) + height * len(bars), title=title)
    draw_bars(axes, names, bars, limit)
    return to_svg(figure, inline=not title)


@styled
def draw_tiles(axes: Axes, tiles: Iterable[tuple[int, int, str, str]]) -> None:
    """Draw tiles with text on a grid.

    Args:
        tiles: row, column, colour and text of each; the text may have several lines.
    """
    places = []
    for row, column, ground, text in tiles:
        axes.add_patch(Rectangle((column + 0.02, row + 0.03), 0.96, 0.94, color=ground))
        axes.text(column + 0.5, row + 0.5, text, color=ink(ground), ha="center", va="center", linespacing=1.6)
        places.append((row + 1, column + 1))
    rows, columns = map(max, zip(*places, strict=True))
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    """Leave out the spines, the grid and the marks of the ticks, but not their labels."""
    axes.spines[:].set_visible(False)
    axes.grid(False)
    axes.tick_params(length=0)


@styled
def draw_scatter(axes: Axes, points: Mapping[str, Points], *, unit: str, log: bool = False) -> None:
    """Draw estimated over measured values, with lines where both are equal and 10 % apart.

    Args:
        points: by name, (measured, estimated).
    """
    values = [value for group in points.values() for point in group for value in point]
    low, high = (min(values) / 1.1 if log else 0.0), 1.05 * max(values)
    for factor, style in ((1.0, "-"), (1.1, "--"), (0.9, "--")):
        axes.plot([low, high], [factor * low, factor * high], style, color=FAINT, linewidth=0.9)
    for (name, group), colour in zip(points.items(), cycle(COLOURS), strict=False):
        xs, ys = zip(*group, strict=True)
        axes.scatter(xs, ys, s=10 if len(values) > 200 else 30, color=colour, alpha=0.6, linewidths=0, label=name)
    if log:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(_locate_powers(low, high))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel=f"measured [{unit}]", ylabel=f"estimated [{unit}]; dashed: 10 % off")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
