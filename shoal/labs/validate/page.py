"""HTML page of a validation: estimates plotted against measurements, one dot for each published point."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.labs.validate.score import Scored, group_by, totals
from shoal.report.charts import draw_scatter, new_figure, to_svg
from shoal.report.page import page
from shoal.report.tables import html_table, html_tiles


def write_page(path: Path, scored: Scored, left: int) -> None:
    """Write the page as one file."""
    facts = [
        (
            f"{what}: median error of {errors.rows:,} {kind}; 90 % within {100 * errors.ninetieth:.0f} %",
            f"{100 * errors.median:.1f} %",
        )
        for what, part in totals(scored).items()
        for kind, errors in (("times", part.time), ("memory figures", part.memory))
        if errors.rows
    ]
    graded = scored.where(lambda p: p.quality in "AM")
    parts = [
        html_tiles(facts),
        "<h2>Step time, quality A</h2>",
        scatter(graded, graded.seconds, graded.measured_seconds, "s", "step time"),
        "<h2>Memory, quality A and M</h2>",
        scatter(graded, graded.bytes / 1e9, graded.measured_bytes / 1e9, "GB", "memory"),
        "<h2>By source</h2>",
        _sources(scored),
    ]
    lead = f"{len(scored.points):,} published points, estimated; {left:,} could not be."
    path.write_text(page("Validation", lead, parts), encoding="utf-8")


def scatter(scored: Scored, estimate: np.ndarray, measured: np.ndarray, unit: str, what: str) -> str:
    """Plot estimates against measurements on logarithmic axes, a colour for each source."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for point, x, y in zip(scored.points, measured, estimate, strict=True):
        if not np.isnan(x):
            groups.setdefault(point.file, []).append((x, y))
    if not groups:
        return f"<p>No {what} was published.</p>"
    figure, (axes,) = new_figure(780, 540)
    # The largest groups first, so that small ones lie over them.
    draw_scatter(axes, dict(sorted(groups.items(), key=lambda item: -len(item[1]))), unit=unit, log=True)
    return to_svg(figure, inline=True)


def _sources(scored: Scored) -> str:
    errors = ("median", "90 %", "bias")
    parts = group_by(scored, lambda p: f"{p.file}, {p.quality}")
    rows = [[name, *part.time.cells()[:-1], *part.memory.cells()[:-1]] for name, part in parts.items()]
    return html_table(rows, ("source", "times", *errors, "memory", *errors))
