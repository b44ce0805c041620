"""The page of a plan: the best layouts side by side, in time and in memory; and the map by model and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shoal.base.units import show_bytes, show_seconds
from shoal.planning.estimate import NAMES, Estimate
from shoal.planning.search.planner import LayoutPlanner
from shoal.planning.search.queries import Answer
from shoal.planning.search.search import Plan
from shoal.report.page import Fragment, page
from shoal.report.planning.estimate_page import COLOURS, bar, legend
from shoal.report.planning.query_lines import mfu_of
from shoal.report.svg import FAINT, INK, Canvas, mix

WIDTH, LEFT, ROW = 860, 300, 30
CELL, NAME = (118, 62), 120


def write_page(path: Path, plan: Plan, estimates: Sequence[Estimate], reasons: Sequence[str]) -> None:
    """Write it as one file."""
    run = plan.run
    rows = "".join(
        f"<tr><td>{escape(_short(e))}</td><td>{show_seconds(e.step_seconds)}</td><td>{100 * e.mfu:.1f} %</td>"
        f"<td>{show_bytes(e.fullest.reserved)}</td><td>{escape(reason)}</td></tr>"
        for e, reason in zip(estimates, reasons, strict=True)
    )
    head = "<tr><th>layout</th><th>step</th><th>MFU</th><th>memory</th><th>against the best</th></tr>"
    parts = [
        "<h2>Time of a step, on the busiest pipeline rank</h2>", times(estimates),
        "<h2>Memory of the fullest rank</h2>", memories(estimates),
        "<h2>Why the best is the best</h2>",
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>',
    ]
    lead = f"{run.cluster.describe()}; {run.global_batch:,} x {run.sequence_length:,} tokens a step."
    path.write_text(page("Plan", lead, [Fragment(part) for part in parts]), encoding="utf-8")


def times(estimates: Sequence[Estimate]) -> str:
    """A bar for each layout, by what takes the time."""
    scale = (WIDTH - LEFT - 80) / max(estimate.step_seconds for estimate in estimates)
    shares = [[estimate.breakdown[name] for name in NAMES] for estimate in estimates]
    ends = [show_seconds(estimate.step_seconds) for estimate in estimates]
    return _bars(estimates, NAMES, shares, scale, ends, "Time of the best layouts")


def memories(estimates: Sequence[Estimate]) -> str:
    """A bar for each layout, by what holds the memory."""
    limit = estimates[0].capacity
    names = list(vars(estimates[0].fullest))
    shares = [list(vars(estimate.fullest).values()) for estimate in estimates]
    ends = [show_bytes(estimate.fullest.reserved) for estimate in estimates]
    return _bars(estimates, names, shares, (WIDTH - LEFT - 80) / limit, ends, "Memory of the best layouts")


def _bars(
    estimates: Sequence[Estimate], names: Sequence[str], shares: Sequence[Sequence[float]], scale: float,
    ends: Sequence[str], title: str,
) -> str:
    canvas = Canvas()
    there = [i for i in range(len(names)) if any(parts[i] > 0 for parts in shares)]
    names, shares = [names[i] for i in there], [[parts[i] for i in there] for parts in shares]
    y = legend(canvas, names)
    for estimate, parts, end in zip(estimates, shares, ends, strict=True):
        canvas.text(LEFT - 8, y + 15, _short(estimate), anchor="end", size=11)
        shifted = Canvas()
        bar(shifted, 0, parts, scale)
        canvas.place(LEFT - 90, y, shifted)  # whose bars begin at 90
        canvas.text(LEFT + sum(parts) * scale + 6, y + 15, end, size=11)
        y += ROW
    return canvas.document(WIDTH, y + 6, title)


def _short(estimate: Estimate) -> str:
    layout = estimate.run.layout
    degrees = [f"{n} {getattr(layout, n)}" for n in ("dp", "cp", "tp", "ep", "pp") if getattr(layout, n) > 1]
    virtual = f" x{layout.virtual_stages}" if layout.virtual_stages else ""
    schedule = f", {layout.schedule}{virtual}" if layout.pp > 1 else ""
    recompute = "" if layout.recompute == "none" else f", {layout.recompute}"
    return f"{' '.join(degrees)}, Z{layout.zero}{schedule}, b{layout.micro_batch}{recompute}"


def write_map(
    path: Path, planners: Sequence[LayoutPlanner], nodes: Sequence[int], found: Sequence[Sequence[Answer | None]]
) -> None:
    """Write a figure with a cell for each model and number of nodes: the best mesh and its MFU, the darker the more.

    Args:
        found: for each planner, for each number of nodes.
    """
    canvas = Canvas()
    width, height = CELL
    for column, count in enumerate(nodes):
        canvas.text(NAME + (column + 0.5) * width, 20, f"{count:,} node{'s' * (count > 1)}", anchor="middle")
    for row, (planner, answers) in enumerate(zip(planners, found, strict=True)):
        y = 32 + row * height
        canvas.text(NAME - 10, y + height / 2 + 4, planner.model, anchor="end")
        for column, answer in enumerate(answers):
            _map_cell(canvas, NAME + column * width, y, answer)
    size = (NAME + len(nodes) * width + 6, 32 + len(planners) * height + 6)
    path.write_text(canvas.document(*size, "The best layout by model and number of nodes"), encoding="utf-8")


def _map_cell(canvas: Canvas, x: float, y: float, answer: Answer | None) -> None:
    width, height = CELL
    if answer is None:
        canvas.add("rect", x=x, y=y, width=width - 4, height=height - 4, rx=4, fill="#f1f2f4")
        canvas.text(x + width / 2 - 2, y + height / 2 + 3, "does not fit", anchor="middle", size=11, fill=FAINT)
        return
    layout, mfu = answer.found.layout, mfu_of(answer)
    fill = mix("#ffffff", COLOURS[0], 0.15 + 0.75 * min(1.0, mfu / 0.8))
    ink = "#ffffff" if mfu > 0.4 else INK
    canvas.add("rect", x=x, y=y, width=width - 4, height=height - 4, rx=4, fill=fill)
    degrees = [f"{n} {getattr(layout, n)}" for n in ("dp", "cp", "tp", "ep", "pp") if getattr(layout, n) > 1]
    words = (" ".join(degrees) or "one device", layout.schedule if layout.pp > 1 else f"ZeRO-{layout.zero}",
             f"MFU {100 * mfu:.0f} %")  # fmt: skip
    for line, text in enumerate(words):
        canvas.text(x + width / 2 - 2, y + 17 + 16 * line, text, anchor="middle", size=11, fill=ink)
