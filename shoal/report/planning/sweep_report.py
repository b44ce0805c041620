"""Table and figure of a sweep: throughput, MFU, memory, and computation over communication, for each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.base.files import write_atomically
from shoal.base.units import show_bytes, show_metric, show_seconds
from shoal.planning.estimate import StepEstimate
from shoal.planning.sweep import network_intensity, sweep
from shoal.report.charts import Axis, draw_lines, new_figure, to_svg
from shoal.report.tables import table_lines
from shoal.spec.layout import Layout

HEADINGS = ("dp", "step", "tokens/s", "a device", "MFU", "memory", "activations", "FLOPs/byte sent", "")


def sweep_lines(
    text: str, layout: Layout, arguments: Mapping[str, Any], model: str, out: Path | None
) -> Iterator[str]:  # fmt: skip
    """Estimate a sweep, and yield a line for each value; draw it to ``out``. See `sweep` for arguments and errors."""
    name, found = sweep(text, layout, **arguments)
    estimates = {value: each for value, each in found if isinstance(each, StepEstimate)}
    sent = {value: intensity for value, each in estimates.items() if (intensity := network_intensity(each))}
    rows = []
    for value, each in estimates.items():
        run, rate = each.run, each.run.tokens / each.step_seconds
        rows.append((
            f"{value:,}", str(run.layout.dp), show_seconds(each.step_seconds), f"{rate:,.0f}",
            f"{rate / run.cluster.size:,.0f}", f"{100 * each.mfu:.1f} %", show_bytes(each.fullest.reserved),
            show_bytes(each.fullest.activations), f"{sent[value]:,.0f}" if value in sent else "–",
            "" if each.fits else "does not fit",
        ))  # fmt: skip
    yield from table_lines((name, *HEADINGS), rows, right=0)
    yield from (f"{name} {value}: {why.splitlines()[0]}" for value, why in found if isinstance(why, str))
    if out:
        devices = f"nodes of {arguments['cluster']}" if name == "nodes" else arguments["cluster"]
        write_atomically(out, draw_sweep(name, estimates, sent, f"{model} on {devices}"))
        yield f"written: {out}"


def draw_sweep(name: str, estimates: Mapping[int, StepEstimate], sent: Mapping[int, float], title: str) -> str:
    """Return four charts as SVG: tokens/s, MFU, memory, and FLOPs over bytes sent.

    Args:
        sent: FLOPs over bytes sent of each value (`network_intensity`).
    """
    figure, charts = new_figure(1040, 620, rows=2, columns=2, title=title)
    rates = {value: each.run.tokens / each.step_seconds for value, each in estimates.items()}
    first = min(rates)
    proportion = {"in proportion": {value: rates[first] * value / first for value in rates}} if name == "nodes" else {}
    held = {value: each.fullest for value, each in estimates.items()}
    drawn: list[tuple[str, dict[str, dict[int, float]], Axis]] = [
        ("Throughput", {"estimated": rates, **proportion}, ("tokens/s", lambda rate: show_metric(rate, ""))),
        ("MFU", {"estimated": {value: 100 * each.mfu for value, each in estimates.items()}},
         ("% of the dense peak", "{:g}".format)),
        ("Memory of the fullest rank",
         {"reserved": {value: each.reserved for value, each in held.items()},
          "activations": {value: each.activations for value, each in held.items()},
          "limit": {value: each.capacity for value, each in estimates.items()}}, ("", show_bytes)),
        ("Computation over communication", {"a device": {**sent}}, ("FLOPs per byte sent", "{:,g}".format)),
    ]  # fmt: skip
    for axes, (heading, lines, y) in zip(charts, drawn, strict=True):
        draw_lines(
            axes, heading, {line: [*points.items()] for line, points in lines.items() if points},
            x=(name.replace("_", " "), str), y=y, dashed=frozenset({"in proportion", "limit"}), dots=True,
            from_zero=True,
        )  # fmt: skip
        if name == "zero":
            axes.set_xscale("linear")
        axes.set_xticks([*estimates], [f"{value:,}" for value in estimates])
    return to_svg(figure)
