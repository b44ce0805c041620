"""HTML page of a plan: time and memory of the best layouts; and the map by model and number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from shoal.base.files import write_atomically
from shoal.base.units import show_bytes, show_seconds
from shoal.planning.estimate import NAMES, StepEstimate
from shoal.planning.full_training import FullTraining
from shoal.planning.search.plan import Plan
from shoal.planning.search.planner import LayoutPlanner
from shoal.report.charts import COLOURS, draw_tiles, new_figure, stacked_bars, to_svg
from shoal.report.page import command, page
from shoal.report.planning.tables import best_mfu, layout_lines
from shoal.report.tables import html_table
from shoal.report.timeline.palette import mix
from shoal.spec.layout import Layout


def write_page(
    path: Path, model: str, plan: Plan, estimates: Sequence[StepEstimate], reasons: Sequence[str],
    training: FullTraining, file: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the page as one file."""
    run, fullest = plan.run, [estimate.fullest for estimate in estimates]
    roles = [found.role for found in plan.listed]
    labels = [(role, _label(estimate.run.layout)) for role, estimate in zip(roles, estimates, strict=True)]
    names = ["\n".join(label) for label in labels]
    steps, sizes = [show_seconds(e.step_seconds) for e in estimates], [show_bytes(f.reserved) for f in fullest]
    times = [list(estimate.breakdown.values()) for estimate in estimates]
    held = [list(vars(memory).values()) for memory in fullest]
    rows = [
        (": ".join(label), step, f"{100 * estimate.mfu:.1f} %", size, reason)
        for label, step, estimate, size, reason in zip(labels, steps, estimates, sizes, reasons, strict=True)
    ]
    lead = (f"{model}, {run.precision}, {run.optimizer}; {run.cluster.describe()}; {run.global_batch:,} sequences of "
            f"{run.sequence_length:,} tokens a step; {date.today()}.")  # fmt: skip
    best = replace(run, layout=plan.found.layout)
    heading, *config = layout_lines(model, best, training.tokens, "The recommended", file)
    text = "\n".join(config)
    parts = [
        "<h2>Time of a step, on the busiest pipeline rank</h2>",
        stacked_bars(NAMES, list(zip(names, times, steps, strict=True)), height=38),
        "<h2>Memory of the fullest rank</h2>",
        stacked_bars(list(vars(fullest[0])), list(zip(names, held, sizes, strict=True)),
                     (estimates[0].capacity, f"{show_bytes(estimates[0].capacity)} of a device"), height=38),
        "<h2>Comparison with the recommended</h2>",
        f"<div class=wrap>{html_table(rows, ('layout', 'step', 'MFU', 'memory', 'against the recommended'))}</div>",
        f"<h2>{escape(heading.rstrip(':'))}</h2><pre>{escape(text)}</pre>",
        command(),
    ]  # fmt: skip
    write_atomically(path, page(f"Plan of {model}", lead, parts))


def _degrees(layout: Layout) -> str:
    return " ".join(f"{n} {getattr(layout, n)}" for n in ("dp", "cp", "tp", "ep", "pp") if getattr(layout, n) > 1)


def _label(layout: Layout) -> str:
    virtual = f" x{layout.virtual_stages}" if layout.virtual_stages else ""
    schedule = f", {layout.schedule}{virtual}" if layout.pp > 1 else ""
    recompute = "" if layout.recompute == "none" else f", {layout.recompute}"
    shard = f"/{layout.zero_shard}" if layout.zero_shard else ""
    return f"{_degrees(layout)}, Z{layout.zero}{shard}{schedule}, b{layout.micro_batch}{recompute}"


def write_map(
    path: Path, planners: Sequence[LayoutPlanner], nodes: Sequence[int], found: Sequence[Sequence[Plan | None]]
) -> None:
    """Write a figure with a cell for each model and number of nodes: the best mesh and its MFU; darker is higher."""
    figure, (axes,) = new_figure(120 + 120 * len(nodes), 30 + 64 * len(planners))
    draw_tiles(axes, (
        (row, column, *_map_cell(plan)) for row, plans in enumerate(found) for column, plan in enumerate(plans)
    ))  # fmt: skip
    axes.set_xticks([column + 0.5 for column in range(len(nodes))], [f"{n:,} node{'s' * (n > 1)}" for n in nodes])
    axes.set_yticks([row + 0.5 for row in range(len(planners))], [planner.model for planner in planners])
    axes.xaxis.tick_top()
    write_atomically(path, to_svg(figure, title="The best layout by model and number of nodes"))


def _map_cell(plan: Plan | None) -> tuple[str, str]:
    """Return the colour and the text of a cell."""
    if plan is None:
        return "#f1f2f4", "does not fit"
    layout, mfu = plan.found.layout, best_mfu(plan)
    schedule = layout.schedule if layout.pp > 1 else f"ZeRO-{layout.zero}"
    words = (_degrees(layout) or "one device", schedule, f"MFU {100 * mfu:.0f} %")
    return mix("#ffffff", COLOURS[0], 0.15 + 0.75 * min(1.0, mfu / 0.8)), "\n".join(words)
