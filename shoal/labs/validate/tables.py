"""Tables of a validation as lines of text, and its HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from shoal.base.files import write_atomically
from shoal.labs.validate.rows import Left
from shoal.labs.validate.score import Scored, group_by, totals
from shoal.labs.validate.validation import Validation
from shoal.report.charts import draw_scatter, new_figure, to_svg
from shoal.report.page import page
from shoal.report.tables import html_table, html_tiles, table_lines
from shoal.spec.catalog.accuracy import Kind

HEADS = (
    "times", "median", "90 %", "bias", "in 80 %", "memory", "median", "90 %", "bias", "in 80 %", "did not fit",
    "precision", "recall",
)  # fmt: skip


def score_lines(found: Validation, worst: int = 0) -> list[str]:
    """Return the scores.

    Args:
        worst: number of rows with the largest errors to list for each file.
    """
    return [*_score(found.scored, found.left), *_held_out(found), *(_worst(found.scored, worst) if worst else ())]


def _score(scored: Scored, left: Left) -> list[str]:
    sources = group_by(scored, lambda p: f"{p.file}, {p.quality}")
    sizes = group_by(scored, lambda p: f"{_size(p.gpus)} accelerators, {p.quality}")
    graded = scored.where(lambda p: p.quality == "A")
    good, families = graded.best
    ran = scored.where(lambda p: not p.oom)
    too_large, even_at_least = ran.part > 1, ran.part * np.exp(-ran.memory_spread) > 1
    lines = [
        *_rows(totals(scored) | sources | sizes),
        f"\nPredicted best layout within 5 % of the measured best: {good} of {families} families of quality A.",
        *(_ratios(graded) if families else ()),
        f"Of {len(ran.points):,} runs that ran, {too_large.sum()} need more memory than there is, by the estimate; "
        f"{even_at_least.sum()} of them even at the lower end of its 80 % interval.",
        f"{len(scored.points):,} rows scored, {sum(left.values()):,} not.",
    ]
    assumed = Counter(name for p in scored.points for name in p.assumed)
    if assumed:
        names = ", ".join(f"{name} ({count:,} rows)" for name, count in assumed.most_common())
        lines.append(f"Assumed where not published: {names}")
    lines += [f"  {file}: {count:,} not scored, {reason}" for (file, reason), count in sorted(left.items())]
    return lines


def _ratios(graded: Scored) -> list[str]:
    """Return how well estimates rank the layouts of a family."""
    lines = [f"Spearman's correlation of their times, in the median family: {graded.correlation:.3f}."]
    for pairs, across in (("two of these times", False), ("two, one of them with tp across nodes", True)):
        median, most = graded.ratio_errors(across=across)
        if not np.isnan(median):
            lines.append(f"Error of the ratio of {pairs}: median {100 * median:.1f} %, 80 % within {100 * most:.1f} %.")
    return lines


def _held_out(found: Validation) -> list[str]:
    """Return a table of errors of what a fit had not seen, and of how many of them intervals hold."""
    rows = []
    for row, kind in enumerate(get_args(Kind)):
        for held_out in found.held_out:
            if held_out.counts(row) > 1:
                of = held_out.coverage(row)
                count, *errors = of.errors.cells()
                label, mean = f"{kind}, {held_out.split} left out", f"{100 * of.inside_groups:.0f} %"
                rows.append([label, count, f"{of.groups}", *errors, mean])
    head = ["not seen by the fit", "rows", "groups", "median", "90 %", "bias", "in 80 %", "mean of groups"]
    return ["", *table_lines(head, rows), "", "Widths of these intervals are of all other groups."]


def _worst(scored: Scored, count: int) -> list[str]:
    """Return the rows with the largest errors of each file."""
    lines = []
    for file, part in group_by(scored.where(lambda p: p.seconds is not None), lambda p: p.file).items():
        lines.append(f"\n{file}: the largest errors of its times")
        errors = part.seconds / part.measured_seconds
        order = sorted(range(len(errors)), key=lambda i: 1 - max(errors[i], 1 / errors[i]))
        for i in order[:count]:
            p, run = part.points[i], part.points[i].run
            layout = f"{run.layout.describe()}, {run.microbatches} x {run.layout.micro_batch} x {run.sequence_length}"
            what = f"{p.model}, {run.precision}, {run.cluster.accelerator.name}: {layout}"
            lines.append(f"  {p.row} {what}: {part.seconds[i]:.3g} s, measured {p.seconds:.3g}")
    return lines


def _size(gpus: int) -> str:
    """Return a range of accelerators as a label that sorts."""
    ends = [(8, "   1 to    8"), (32, "   9 to   32"), (128, "  33 to  128"), (256, " 129 to  256"),
            (1024, " 257 to 1024")]  # fmt: skip
    return next((label for end, label in ends if gpus <= end), "1025 and more")


def _rows(scores: Mapping[str, Scored]) -> list[str]:
    """Return a heading and a line for each group."""
    rows = []
    for name, scored in scores.items():
        count, precision, recall = scored.out_of_memory
        oom = [f"{count:,}", f"{precision:.3f}", f"{recall:.3f}"] if count else [""] * 3
        rows.append([name, *scored.time.cells(), *scored.memory.cells(), *oom])
    return table_lines(["", *HEADS], rows, right=1)


def write_page(path: Path, scored: Scored, left: int) -> None:
    """Write a page with estimates plotted against measurements, one dot for each published point."""
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
    errors = ("median", "90 %", "bias")
    sources = [
        [name, *part.time.cells()[:-1], *part.memory.cells()[:-1]]
        for name, part in group_by(scored, lambda p: f"{p.file}, {p.quality}").items()
    ]
    parts = [
        html_tiles(facts),
        "<h2>Step time, quality A</h2>",
        _scatter(graded, graded.seconds, graded.measured_seconds, "s", "step time"),
        "<h2>Memory, quality A and M</h2>",
        _scatter(graded, graded.bytes / 1e9, graded.measured_bytes / 1e9, "GB", "memory"),
        "<h2>By source</h2>",
        html_table(sources, ("source", "times", *errors, "memory", *errors)),
    ]
    lead = f"{len(scored.points):,} published points, estimated; {left:,} could not be."
    write_atomically(path, page("Validation", lead, parts))


def _scatter(scored: Scored, estimate: np.ndarray, measured: np.ndarray, unit: str, what: str) -> str:
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
