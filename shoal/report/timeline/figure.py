"""Timelines as a figure for a paper, as SVG or PNG.

Lengths are in points (1/72 inch): a two-column page is 504 wide, one column 240.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shoal.base.files import write_atomically
from shoal.report.charts import hide_frame, styled, to_svg
from shoal.report.timeline.chart import Chart, axis, has_shades, legend
from shoal.report.timeline.palette import FAINT, colour, ink

PAGE = 504.0  # the text width of a US letter page with one-inch margins is 468; two-column styles have 504
FONT = 7.0  # minimum font size accepted by journals
DIGIT = 0.56  # width of a digit, in font sizes (Helvetica)
GROUND = "#f1f3f5"
DPI = 300
HALVES = np.array([(0.0, 1.0), (0.0, 0.5), (0.5, 0.5)])  # offset and height of an action in its lane, by `Chart.half`


@styled
def draw_timelines(charts: Sequence[Chart]) -> Figure:
    """Draw timelines, whose times are all in the same unit, above each other on one time axis, with a legend."""
    end = max(chart.timeline.step_time for chart in charts) or 1.0
    ranks = [chart.timeline.ranks for chart in charts]
    lane = max(2.0, min(11.0, 150 / max(ranks)))
    handles = [Patch(color=colour(paint), label=name) for paint, name in legend(charts)]
    if has_shades(charts):
        handles.append(Patch(color="none", label="lighter: a later stage of the rank"))
    columns = int(PAGE / 125)
    height = sum(ranks) * lane + 18 * len(charts) + 22 + 12 * -(-len(handles) // columns)
    figure = Figure(figsize=(PAGE / 72, height / 72), layout="constrained")
    every = figure.subplots(len(charts), squeeze=False, sharex=True, height_ratios=ranks)[:, 0]
    for axes, chart in zip(every, charts, strict=True):
        axes.set(xlim=(0, end), ylim=(chart.timeline.ranks, 0))
        _draw_lanes(axes, chart, (PAGE - 40) / end, lane)
    unit, numbers = axis(end, int(PAGE / 45), seconds=charts[0].seconds)
    *others, (_, last) = numbers
    labels = [*(number for _, number in others), f"{last} {unit}"]
    every[-1].set_xticks([share * end for share, _ in numbers], labels, size=FONT)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=FONT, handlelength=1.0)
    return figure


def _draw_lanes(axes: Axes, chart: Chart, per_time: float, lane: float) -> None:
    """Draw the actions of every rank: y is the rank, x the time, of which one has ``per_time`` points."""
    columns, ranks, gap = chart.timeline.columns, chart.timeline.ranks, min(0.15, 1.5 / lane)
    fills = [colour(paint) for paint in chart.paints]
    down, part = (1 - gap) * HALVES[chart.half].T
    left, right, top = chart.start, chart.end, columns.rank + down
    corners = np.stack([[left, top], [right, top], [right, top + part], [left, top + part]])  # [4, 2, rows]
    axes.barh(np.arange(ranks), axes.get_xlim()[1], height=1 - gap, align="edge", color=GROUND)
    axes.add_collection(PolyCollection(
        [*corners.transpose(2, 0, 1)], facecolors=[fills[i] for i in chart.paint], edgecolors="white", linewidths=0.3
    ))  # fmt: skip
    size = min(6.5, (1 - gap) * lane * 0.75)
    needed = (len(str(columns.microbatch.max(initial=0))) + 0.5) * DIGIT * size / per_time
    if size >= 4.5:
        for row in np.flatnonzero((columns.microbatch >= 0) & (right - left >= needed)):
            axes.text((left[row] + right[row]) / 2, top[row] + part[row] / 2, f"{columns.microbatch[row]}",
                      size=min(size, part[row] * lane), color=ink(fills[chart.paint[row]]), ha="center",
                      va="center_baseline")
    shown = range(0, ranks, int(-(-FONT * 1.15 // lane)))
    axes.set_yticks([rank + (1 - gap) / 2 for rank in shown], [f"{chart.lane} 0", *map(str, shown[1:])], size=FONT)
    axes.set_title(chart.name, size=8)
    axes.set_title(chart.caption(), size=FONT, loc="right", weight="normal", color=FAINT)
    hide_frame(axes)


def write_figure(path: Path, charts: Sequence[Chart]) -> None:
    """Write a figure as SVG or PNG, by the file name's suffix."""
    drawn = draw_timelines(charts)
    if path.suffix == ".svg":
        write_atomically(path, to_svg(drawn))
    else:
        content = io.BytesIO()
        drawn.savefig(content, format="png", dpi=DPI)
        write_atomically(path, content.getvalue())
