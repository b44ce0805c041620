"""The page of a validation: estimates over measurements, one dot for each published point."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from shoal.labs.validate.score import Scored, by, totals
from shoal.report.planning.page_parts import html_table, write
from shoal.report.svg import FAINT, GRID, INK, Canvas

COLOURS = (
    "#4a7fc1", "#e79245", "#2f9488", "#cb5a3c", "#8c7fb8", "#c3618d", "#b8a21f", "#6f7c91", "#5b3f8c", "#7fae3c",
    "#1f4e79", "#a0522d", "#33a1c9", "#d4a5a5", "#3c6e47", "#2b2b2b",
)  # fmt: skip
SIZE, LEFT, BOTTOM, LEGEND = 520, 64, 44, 250


def write_page(path: Path, scored: Scored, left: int) -> None:
    """Write it as one file."""
    tiles = "".join(
        f"<div><b>{100 * errors.median:.1f} %</b><span>{escape(what)}: median error of {errors.rows:,} {kind}; "
        f"90 % within {100 * errors.ninetieth:.0f} %</span></div>"
        for what, part in totals(scored).items()
        for kind, errors in (("times", part.time), ("memory figures", part.memory))
        if errors.rows
    )
    graded = scored.where(lambda p: p.quality in "AM")
    parts = [
        f'<div class="answer">{tiles}</div>',
        "<h2>Step time, quality A</h2>",
        scatter(graded, graded.seconds, graded.measured_seconds, "s", "step time"),
        "<h2>Memory, quality A and M</h2>",
        scatter(graded, graded.bytes / 1e9, graded.measured_bytes / 1e9, "GB", "memory"),
        "<h2>By source</h2>",
        _sources(scored),
    ]
    lead = f"{len(scored.points):,} published points, estimated; {left:,} could not be."
    write(path, "Validation", lead, parts)


def scatter(scored: Scored, estimate: np.ndarray, measured: np.ndarray, unit: str, what: str) -> str:
    """Estimated over measured, both logarithmic, with lines at 10 % to either side of equal."""
    canvas, known = Canvas(), ~np.isnan(measured)
    if not known.any():
        canvas.text(LEFT, 20, f"No {what} was published.", fill=FAINT)
        return canvas.document(SIZE, 40, what)
    values = np.concatenate([estimate[known], measured[known]])
    low, high = floor(log10(values.min()) * 2) / 2, ceil(log10(values.max()) * 2) / 2
    plot = SIZE - LEFT - 10

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * plot

    def y(value: float) -> float:
        return 10 + plot - (log10(value) - low) / (high - low) * plot

    for power in range(ceil(low), floor(high) + 1):
        value = 10.0**power
        canvas.add("line", x1=x(value), x2=x(value), y1=10, y2=10 + plot, stroke=GRID)
        canvas.add("line", x1=LEFT, x2=LEFT + plot, y1=y(value), y2=y(value), stroke=GRID)
        canvas.text(x(value), 26 + plot, f"{value:g}", anchor="middle", size=11, fill=FAINT)
        canvas.text(LEFT - 6, y(value) + 4, f"{value:g}", anchor="end", size=11, fill=FAINT)
    files = sorted({p.file for p, k in zip(scored.points, known, strict=True) if k})
    many = max(files, key=lambda file: sum(p.file == file for p in scored.points))
    for file in sorted(files, key=lambda file: file != many):  # the many below the few
        colour = COLOURS[files.index(file) % len(COLOURS)]
        for i, p in enumerate(scored.points):
            if known[i] and p.file == file:
                canvas.add("circle", cx=x(measured[i]), cy=y(estimate[i]), r=2, fill=colour, fill_opacity=0.55)
    for factor, dash in ((1.0, ""), (1.1, "4 3"), (1 / 1.1, "4 3")):
        ends = 10**low * max(1, 1 / factor), 10**high / max(1, factor)
        style = {"stroke_dasharray": dash} if dash else {}
        (x1, y1), (x2, y2) = ((x(end), y(end * factor)) for end in ends)
        canvas.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=INK, **style)
    for i, file in enumerate(files):
        canvas.add("circle", cx=SIZE + 16, cy=20 + 18 * i, r=4, fill=COLOURS[i % len(COLOURS)])
        canvas.text(SIZE + 26, 24 + 18 * i, file, size=11)
    canvas.text(LEFT, 42 + plot, f"measured {what} [{unit}], estimated upwards; dashed: 10 % off", size=11, fill=FAINT)
    return canvas.document(
        SIZE + LEGEND, max(plot + BOTTOM + 10, 24 + 18 * len(files)), f"Estimated over measured {what}"
    )


def _sources(scored: Scored) -> str:
    errors = ("median", "90 %", "bias")
    parts = by(scored, lambda p: f"{p.file}, {p.quality}")
    rows = [[name, *part.time.cells()[:-1], *part.memory.cells()[:-1]] for name, part in parts.items()]
    return html_table(rows, ("source", "times", *errors, "memory", *errors))
