"""HTML pages of an estimate and of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.base.files import write_atomically
from shoal.base.units import show_bytes, show_metric, show_number, show_seconds
from shoal.planning.cost.roofline import OperationCost, matrix_product
from shoal.planning.estimate import ROUNDING, Estimate, StepEstimate
from shoal.planning.run import KINDS
from shoal.report.charts import PAGE_WIDTH, draw_lines, new_figure, stacked_bars, styled, to_svg
from shoal.report.page import command, page
from shoal.report.planning.estimate_lines import bound
from shoal.report.planning.tables import layout_lines
from shoal.report.tables import html_table
from shoal.report.timeline.palette import FAINT

if TYPE_CHECKING:
    from shoal.training.dry_run.dry_run import Counted

KEPT, PEAK, MEASURED = "#4a7fc1", "#b9cde8", "#cb5a3c"


def write_page(
    path: Path, estimate: StepEstimate, facts: Sequence[tuple[str, str]], changes: Sequence[tuple[str, str]],
    model: str, tokens: float,
) -> None:  # fmt: skip
    """Write the page of an estimate as one file, given `estimate_facts`, `change_rows` and the tokens of the complete
    training."""
    run, memory = estimate.run, estimate.memory
    held = [(f"pp {rank}", list(vars(each).values()), "") for rank, each in enumerate(memory)]
    limit = estimate.capacity, f"{show_bytes(estimate.capacity)} of a device"
    least = ROUNDING * estimate.step_seconds
    times = {name: seconds for name, seconds in estimate.breakdown.items() if seconds > least}
    spent = [f"{name} {show_seconds(seconds)}" for name, seconds in times.items()]
    lead = (f"{model}, {run.precision}, {run.optimizer}; {run.cluster.describe()}; {run.layout.describe()}; "
            f"{run.global_batch:,} sequences of {run.sequence_length:,} tokens a step; {date.today()}.")
    verdict = [f"<p{'' if estimate.fits else ' class=alarm'}>{escape(bound(estimate))}</p>",
               f"<div class=names>{html_table(changes)}</div>"]
    heading, *config = layout_lines(model, run, tokens, "The layout")
    parts = [
        *(verdict if not estimate.fits else ()),
        f"<div class=wrap>{html_table(facts)}</div>",
        "<h2>Memory of each pipeline rank</h2>",
        stacked_bars(list(vars(memory[0])), held, limit),
        "<h2>One step, on the busiest pipeline rank</h2>",
        stacked_bars(spent, [("", list(times.values()), "")]),
        *(("<h2>Roofline</h2>", roofline(estimate)) if isinstance(estimate, Estimate) else ()),
        *(("<h2>What bounds it, and what to change</h2>", *verdict) if estimate.fits else ()),
        f"<h2>{escape(heading.rstrip(':'))}</h2><pre>{escape(chr(10).join(config))}</pre>", command(),
    ]  # fmt: skip
    write_atomically(path, page(f"Estimate of {model}", lead, parts))


def operations(estimate: Estimate) -> dict[str, OperationCost]:
    """Return the products of one layer on one rank, by name; expert products are per expert."""
    run = estimate.run
    shape, layout, e = run.shape, run.layout, run.policy.compute.itemsize
    factor = {"fp8": 1, "fp4": 0.5}.get(run.products, e)  # bytes of an element of a factor
    n, y = estimate.forward.tokens, layout.tp_y
    hidden = shape.hidden // layout.tp_x
    if (latent := shape.latent) is not None:
        expanded = shape.heads * (shape.head_dim + shape.value_dim) // y
        into = latent.query_rank or shape.hidden
        found = {
            "q": matrix_product(n, into, shape.heads * shape.query_dim // y, factor, e),
            "k, v": matrix_product(n, latent.key_value_rank, expanded, factor, e),
        }
    else:
        found = {
            "q": matrix_product(n, hidden, shape.heads * shape.head_dim // y, factor, e),
            "k": matrix_product(n, hidden, shape.kv_heads * shape.head_dim // min(y, shape.kv_heads), factor, e),
        }
    if not all(map(shape.sparse, range(shape.layers))):
        found["up"] = matrix_product(n, hidden, shape.ffn // y, factor, e)
        found["down"] = matrix_product(n, shape.ffn // y, hidden, factor, e)
    if experts := shape.experts:
        rows = estimate.forward.routed.computed * layout.ep / experts.count
        width = experts.ffn // layout.expert_tensor
        found["expert's up"] = matrix_product(rows, shape.hidden, width, factor, e)
        found["expert's down"] = matrix_product(rows, width, shape.hidden, factor, e)
    head = matrix_product(n, shape.hidden, shape.vocabulary_rows(layout.tp), e)
    return found | {"head": head, "residual": OperationCost(n * hidden, 3 * e * n * hidden)}


def roofline(estimate: Estimate) -> str:
    """Draw the roofline of a layer's operations from the data sheet's peak and bandwidth."""
    points = {name: (work.intensity, attainable(estimate, name, work)) for name, work in operations(estimate).items()}
    bandwidth = estimate.run.cluster.accelerator.memory_bandwidth
    return draw_roofline(points, estimate.peak, bandwidth, "Roofline of one layer's operations", inline=True)


def attainable(estimate: Estimate, name: str, work: OperationCost) -> float:
    """Return the FLOP/s of an operation under the roof; the head and attention are not in 8 or 4 bits."""
    machine, wide = estimate.run.cluster.accelerator, name in ("head", "attention")
    peak = machine.dense_flops(KINDS[estimate.run.policy.compute.name]) if wide else estimate.peak
    return min(peak, work.intensity * machine.memory_bandwidth)


def draw_roofline(
    points: Mapping[str, tuple[float, float]], peak: float, bandwidth: float, title: str, *, inline: bool = False
) -> str:
    """Draw a roofline and operations by name, as (FLOPs per byte, FLOP/s): on it, or under it if measured."""
    ridge = peak / bandwidth
    least = min(ridge / 1000, *(intensity for intensity, _ in points.values()))
    series = {f"ridge: {show_number(ridge)}": [(least, least * bandwidth), (ridge, peak), (100 * ridge, peak)]}
    series |= {f"{name}: {show_number(point[0])}": [point] for name, point in points.items()}
    figure, (axes,) = new_figure(PAGE_WIDTH, 380)
    draw_lines(axes, title, series, dots=True, x=("FLOPs per byte of memory", show_number),
               y=("FLOP/s", lambda y: show_metric(y, "")), legend="FLOPs per byte")  # fmt: skip
    return to_svg(figure, inline=inline)


def write_memory_page(path: Path, estimate: Estimate, counted: Counted, measured: Counted | None) -> None:
    """Write the page of a dry run as one file: memory over a rank's first steps, per action, predicted and measured."""
    rows = [(name, show_bytes(size)) for name, size in counted.held.items() if size]
    layout = estimate.run.layout
    lead = f"{counted.where} of {layout.world_size:,}; {layout.describe()}; {len(counted.steps)} steps; {date.today()}."
    parts = [
        "<h2>Memory, action by action</h2>", memory_profile(counted, measured),
        "<h2>Between steps</h2>", html_table(rows), command(),
    ]  # fmt: skip
    write_atomically(path, page("Dry run", lead, parts))


@styled
def memory_profile(counted: Counted, measured: Counted | None = None) -> str:
    """Draw the bytes alive after each action (filled), the peak within it (pale) and the measured peak (line)."""
    moments = [moment for step in counted.steps for moment in step.moments]
    figure, (axes,) = new_figure(760, 330)
    edges = [*range(len(moments) + 1)]
    axes.stairs([m.peak for m in moments], edges, fill=True, color=PEAK, label="most in an action")
    axes.stairs([m.alive for m in moments], edges, fill=True, color=KEPT, label="alive after it")
    if measured:
        peaks = [moment.peak for step in measured.steps for moment in step.moments]
        axes.stairs(peaks, [*range(len(peaks) + 1)], color=MEASURED, linewidth=1.5, label="most, measured")
    begins = [0, *accumulate(len(step.moments) for step in counted.steps)][:-1]
    for begin in begins:
        axes.axvline(begin, color=FAINT, linestyle=":", linewidth=1)
    axes.set_xticks(begins, [f"step {i + 1}" for i in range(len(begins))], ha="left")
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(size))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    return to_svg(figure, inline=True)
