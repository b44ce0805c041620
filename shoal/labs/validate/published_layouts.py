"""Published layouts of large models beside the layouts that a search finds for the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.validate.rows import Point
from shoal.planning.estimate import StepEstimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace
from shoal.planning.software_estimate import estimate_run
from shoal.report.planning.other_software import words
from shoal.report.tables import table_lines

LARGE = 30e9  # parameters
MOST, OF_A_SOURCE = 12, 2  # layouts, in all and of a file
RECOMPUTE = ("none", "selective", "full")


def select_layouts(points: Sequence[Point]) -> list[Point]:
    """Return the published layouts with the most tokens per second and accelerator, of the largest dense models.

    One for each shape of a model, accelerator and software, and at most `OF_A_SOURCE` of each file.
    """
    best: dict[tuple, Point] = {}
    for point in points:
        run = point.run
        if point.seconds and run.shape.experts is None and run.shape.parameters() >= LARGE and run.cluster.nodes > 1:
            key = run.shape.layers, run.shape.hidden, run.cluster.accelerator.name, run.software.name
            known = best.get(key)
            if known is None or _rate(point) > _rate(known):
                best[key] = point
    largest, taken = sorted(best.values(), key=lambda point: -point.run.shape.parameters()), Counter[str]()
    chosen = []
    for point in largest:
        taken[point.file] += 1
        if taken[point.file] <= OF_A_SOURCE:
            chosen.append(point)
    return chosen[:MOST]


def _rate(point: Point) -> float:
    return point.run.tokens / (point.seconds or float("inf")) / point.gpus


def estimate_published(point: Point) -> StepEstimate:
    """Estimate a published layout; if its recomputation was not published, with the least that fits."""
    known = estimate_run(point.run)
    if known.fits or "recompute" not in point.assumed:
        return known
    layouts = (point.run.layout.model_copy(update={"recompute": mode}) for mode in RECOMPUTE)
    return next((e for e in (estimate_run(replace(point.run, layout=each)) for each in layouts) if e.fits), known)


def layout_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield a table of published layouts: measured, estimated, whether they fit, and the plan for the same run."""
    rows, impossible = [], 0
    for point in select_layouts(points):
        estimate, seconds = estimate_published(point), point.seconds or float("nan")
        impossible += not estimate.may_fit
        memory = f"{show_bytes(estimate.fullest.reserved)} of {show_bytes(estimate.capacity)}"
        verdict = "" if estimate.fits else ", may fit" if estimate.may_fit else ", does not fit"
        rows.append([
            f"{point.model}, {point.gpus:,} {point.run.cluster.accelerator.name}, {point.run.software.name}",
            words(estimate.run.layout), show_seconds(seconds),
            f"{show_seconds(estimate.step_seconds)} ({100 * (estimate.step_seconds / seconds - 1):+.0f} %)",
            memory + verdict, *_plan(point.run, estimate.step_seconds),
        ])  # fmt: skip
    head = ["model", "published layout", "measured", "estimate", "memory", "planned layout", "estimate"]
    yield from table_lines(head, rows)
    yield ""
    yield f"{impossible} of these {len(rows)} layouts, which all ran, are called impossible."


def _plan(run: EstimatedRun, seconds: float) -> tuple[str, str]:
    """Return the recommended layout and its time relative to the published layout's."""
    best = search(run, LayoutSpace()).best
    if not best:
        return "none", ""
    return words(best[0].layout), f"{show_seconds(best[0].seconds)} ({100 * (best[0].seconds / seconds - 1):+.0f} %)"
