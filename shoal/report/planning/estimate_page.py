"""The page of an estimate: memory of every pipeline rank, where the time goes, a roofline, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path

from shoal.base.units import show_bytes, show_seconds
from shoal.planning.cost.context import tokens_here
from shoal.planning.cost.experts import routed_rows
from shoal.planning.cost.roofline import OperationCost, matrix_product, ridge
from shoal.planning.estimate import Estimate
from shoal.planning.run import KINDS
from shoal.report.page import Fragment, page
from shoal.report.planning.estimate_lines import bound
from shoal.report.svg import FAINT, GRID, INK, Canvas

COLOURS = (
    "#4a7fc1", "#2f9488", "#8c7fb8", "#e79245", "#f1c667", "#cb5a3c", "#c3618d", "#6f7c91", "#a3b86c", "#b08968",
    "#7aa5b8", "#c9ced6",
)  # fmt: skip
WIDTH, LEFT, BAR = 760, 90, 22


def write_page(
    path: Path, estimate: Estimate, facts: Sequence[tuple[str, str]], changes: Sequence[tuple[str, str]]
) -> None:
    """Write it as one file.

    Args:
        facts: the run in numbers, as (name, value).
        changes: of the layout, and what each would do.
    """
    run = estimate.run
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts)
    rows = "".join(f"<tr><td>{escape(what)}</td><td>{escape(effect)}</td></tr>" for what, effect in changes)
    parts = [
        f'<div class="answer">{tiles}</div>',
        "<h2>Memory of each pipeline rank</h2>", memory_bars(estimate),
        "<h2>One step of the busiest</h2>", timebar(estimate),
        "<h2>Roofline</h2>", roofline(estimate),
        "<h2>What bounds it, and what to change</h2>", f"<p>{escape(bound(estimate))}</p>",
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>',
    ]
    lead = f"{run.cluster.describe()}; {run.layout.describe()}; {run.global_batch:,} x {run.sequence_length:,} tokens."
    path.write_text(page("Estimate", lead, [Fragment(part) for part in parts]), encoding="utf-8")


def memory_bars(estimate: Estimate) -> str:
    """A bar for each pipeline rank, to the limit of the device."""
    limit = estimate.capacity
    scale = (WIDTH - LEFT - 10) / max(limit, *(memory.reserved for memory in estimate.memory))
    canvas = Canvas()
    top = y = legend(canvas, list(vars(estimate.fullest)))
    for rank, memory in enumerate(estimate.memory):
        canvas.text(LEFT - 8, y + 15, f"pp {rank}", anchor="end")
        bar(canvas, y, list(vars(memory).values()), scale)
        y += BAR + 6
    x = LEFT + limit * scale
    canvas.add("line", x1=x, x2=x, y1=top - 4, y2=y, stroke=INK, stroke_dasharray="4 3")
    canvas.text(x - 4, y + 12, f"{show_bytes(limit)} of a device", anchor="end", fill=FAINT)
    return canvas.document(WIDTH, y + 20, "Memory of each pipeline rank")


def timebar(estimate: Estimate) -> str:
    """What takes the time of a step."""
    parts = {name: seconds for name, seconds in estimate.breakdown.items() if seconds > 0}
    canvas = Canvas()
    y = legend(canvas, [f"{name} {show_seconds(seconds)}" for name, seconds in parts.items()])
    bar(canvas, y, list(parts.values()), (WIDTH - LEFT - 10) / estimate.step_seconds)
    return canvas.document(WIDTH, y + BAR + 8, "Where the time of a step goes")


def operations(estimate: Estimate) -> dict[str, OperationCost]:
    """The products of one layer on one rank, by name; of experts, those of each."""
    run = estimate.run
    shape, layout, e = run.shape, run.layout, run.policy.compute.itemsize
    factor = 1 if run.eight_bits else e
    n, y = layout.micro_batch * tokens_here(layout, run.sequence_length), layout.tp_y
    hidden = shape.hidden // layout.tp_x
    found = {
        "q": matrix_product(n, hidden, shape.heads * shape.head_dim // y, factor, e),
        "k": matrix_product(n, hidden, shape.kv_heads * shape.head_dim // min(y, shape.kv_heads), factor, e),
    }
    if not all(map(shape.sparse, range(shape.layers))):
        found["up"] = matrix_product(n, hidden, shape.ffn // y, factor, e)
        found["down"] = matrix_product(n, shape.ffn // y, hidden, factor, e)
    if experts := shape.experts:
        rows = routed_rows(shape, layout, run.sequence_length).here * layout.ep / experts.count
        width = experts.ffn // layout.expert_tensor
        found["expert's up"] = matrix_product(rows, shape.hidden, width, factor, e)
        found["expert's down"] = matrix_product(rows, width, shape.hidden, factor, e)
    head = matrix_product(n, shape.hidden, -(-shape.vocab // layout.tp), e)
    return found | {"head": head, "residual": OperationCost(n * hidden, 3 * e * n * hidden)}


def roofline(estimate: Estimate) -> str:
    """Arithmetic intensity against what the data sheet's peak and bandwidth allow, both logarithmic."""
    machine = estimate.run.cluster.accelerator
    peak, bandwidth = estimate.peak, machine.memory_bandwidth
    wide = machine.dense_flops(KINDS[estimate.run.policy.compute.name])  # of the head, where layers are in 8 bits
    canvas, height = Canvas(), 300
    low, high = -1.0, 5.0

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = LEFT + (log10(intensity) - low) / (high - low) * (WIDTH - LEFT - 20)
        return x, height - 30 - (log10(rate) - log10(peak) + 4) / 4.3 * (height - 50)

    for power in range(-1, 6):
        x, _ = at(10.0**power, peak)
        canvas.add("line", x1=x, x2=x, y1=10, y2=height - 30, stroke=GRID)
        canvas.text(x, height - 14, f"{10.0**power:g}", anchor="middle", size=11, fill=FAINT)
    corner = ridge(peak, bandwidth)
    corners = (at(10**low, bandwidth * 10**low), at(corner, peak), at(10**high, peak))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    canvas.add("polyline", points=points, fill="none", stroke=COLOURS[0], stroke_width=2)
    said = f"ridge {corner:.0f} FLOPs/byte, by the data sheet"
    canvas.text(*at(corner, peak * 1.15), said, size=11, fill=FAINT, anchor="end")
    for i, (name, work) in enumerate(operations(estimate).items()):
        x, y = at(work.intensity, min(wide if name == "head" else peak, work.intensity * bandwidth))
        canvas.add("circle", cx=x, cy=y, r=4, fill=COLOURS[5])
        row = 0 if name == "residual" else i  # which is far from the others
        digits = 0 if work.intensity >= 100 else 1
        canvas.text(x + 6, y + 14 + 13 * row, f"{name} {work.intensity:,.{digits}f}", size=11)
    canvas.text(LEFT, height, "FLOPs per byte of memory", size=11, fill=FAINT)
    return canvas.document(WIDTH, height + 6, "Roofline of one layer's operations")


def legend(canvas: Canvas, names: Sequence[str]) -> float:
    """Colours and their names, in rows of three; where what follows begins."""
    for i, name in enumerate(names):
        x, y = 10 + i % 3 * 250, 8 + i // 3 * 18
        canvas.add("rect", x=x, y=y, width=11, height=11, fill=COLOURS[i])
        canvas.text(x + 16, y + 10, name)
    return 8 + -(-len(names) // 3) * 18 + 8


def bar(canvas: Canvas, y: float, values: Sequence[float], scale: float) -> None:
    x = float(LEFT)
    for i, value in enumerate(values):
        canvas.add("rect", x=x, y=y, width=value * scale, height=BAR, fill=COLOURS[i])
        x += value * scale
