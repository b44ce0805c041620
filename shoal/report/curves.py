"""Curves of runs as interactive figures of a page: a still report, or a live page that asks for new values.

`describe_curves` makes the values of one run plain data; ``assets/curves.js`` draws them. Names that come from files
are printable, and the script treats them as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.base.terminal import printable
from shoal.report.page import Fragment, json_script
from shoal.training.records.metrics import StepMetrics

MOST_POINTS = 2000  # of a line; more are thinned out
GB = 1e9

Value = Callable[[StepMetrics], float | None]
FIGURES: dict[str, tuple[str, bool, Value]] = {
    "loss": ("loss per token (dots: validation)", True, lambda m: m.loss),
    "tokens_per_second": ("tokens per second", False, lambda m: m.tokens_per_second),
    "mfu": ("model FLOPs utilisation, %", False, lambda m: m.mfu and 100 * m.mfu),
    "memory": ("peak memory of the fullest rank, GB", False, lambda m: m.memory_bytes / GB),
    "gradient_norm": ("gradient norm, before clipping", True, lambda m: m.gradient_norm),
    "learning_rate": ("learning rate", True, lambda m: m.learning_rate),
    "loss_scale": ("loss scale", True, lambda m: m.loss_scale),
    "staleness": ("staleness of updates, mean", False, lambda m: m.staleness),
}
"""Figures by name: the title, whether its axis may be logarithmic (else it starts at 0), and the value of a step."""

VALIDATION = "validation_loss"  # drawn as dots in the figure of the loss
RANKS = "memory_by_rank"
NAMED = {
    "source_loss": "loss of source {}", "source_validation_loss": "validation loss of source {}",
    "named_validation": "validation loss on {}", "metrics": "{}", "validation_metrics": "validation {}",
}  # fmt: skip
"""Fields of `StepMetrics` with a value for each of several names, each a figure."""

OPTIONS = """
<div class="curve-options">
<label><input type="checkbox" id="log-values"> logarithmic values</label>
<label><input type="checkbox" id="log-steps"> logarithmic steps</label>
<label>smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"> <output>0</output></label>
<span id="live" role="status"></span>
</div>
<ul class="curve-runs" id="curve-runs" aria-label="Runs"></ul>
<ul class="curve-marks" id="curve-marks" aria-label="Marks"></ul>
"""


def describe_curves(
    name: str, metrics: Sequence[StepMetrics], events: Sequence[dict[str, Any]], unit: str = "token", layout: str = ""
) -> dict[str, Any]:
    """Return a run's curves as plain data: its name, marks, and each figure's title and lines.

    Values that are not finite are left out, since no axis shows them; the first such step is marked.

    Args:
        unit: what the run counts.
        layout: the one that the run began with.
    """
    figures = []
    for key, (title, logarithmic, read) in FIGURES.items():
        if (lines := {"line": _points(metrics, read)})["line"]:
            if key == "loss" and (dots := _points(metrics, lambda m: m.validation_loss)):
                lines["dots"] = dots
            counted = title if unit == "token" else title.replace(" per token", "").replace("token", unit)
            own = key if counted == title else f"{key}/{unit}"  # runs share a figure if they count the same
            figures.append({"key": own, "title": counted, "log": logarithmic, **lines})
        if key == "memory" and (by_rank := [m.memory_by_rank for m in metrics if m.memory_by_rank]):
            points = [[rank, number / GB] for rank, number in enumerate(by_rank[-1])]
            figures.append({"key": RANKS, "title": "peak memory by rank, GB", "log": False, "ranks": _thin(points)})
    figures += _named_figures(metrics)
    return {"name": printable(name), "figures": figures, "marks": [*_marks(metrics, events, layout)]}


def _named_figures(metrics: Sequence[StepMetrics]) -> Iterator[dict[str, Any]]:
    for field, title in NAMED.items():
        names = dict.fromkeys(name for m in metrics for name in getattr(m, field) or ())
        for name in names:
            if points := _points(metrics, _read_named(field, name)):
                yield {"key": f"{field}/{name}", "title": printable(title.format(name)), "log": True, "line": points}


def _read_named(field: str, name: str) -> Value:
    return lambda m: (getattr(m, field) or {}).get(name)


def _points(metrics: Sequence[StepMetrics], read: Value) -> list[list[float]]:
    """Return the finite values as (step, value)."""
    found = [[m.step, value] for m in metrics if (value := read(m)) is not None and math.isfinite(value)]
    return _thin(found)


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Keep at most `MOST_POINTS` points: the lowest and the highest of each of equal parts, and the last."""
    if len(points) <= MOST_POINTS:
        return points
    kept = [len(points) - 1]
    values = np.array([value for _, value in points])
    for part in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        kept += [int(part[0] + values[part].argmin()), int(part[0] + values[part].argmax())]
    return [points[i] for i in sorted(set(kept))]


def _marks(
    metrics: Sequence[StepMetrics], events: Sequence[dict[str, Any]], before: str
) -> Iterator[dict[str, Any]]:
    """Yield what happened at a step: restarts, changes of the layout, spikes, and the first value that is not finite.

    A layout is known from the events that name it; one that begins after a restart is marked at the restart's step.
    """
    changed, ranks = False, None
    for event in events:
        changed |= event["event"] == "replanned"
        step = event.get("step")
        if type(step) is not int or step < 0:
            continue
        if event["event"] in ("resumed", "recovered", "joined", "rolled back"):
            changed |= ranks is not None and event.get("ranks", ranks) != ranks
            ranks = event.get("ranks", ranks)
            words = f"{event['event']} at step {step}"
            layout = event.get("layout")
            if isinstance(layout, str):
                changed, before = layout != before, layout
            if changed:
                words += ", layout changed" + (f" to {layout}" if isinstance(layout, str) else "")
            yield {"step": step, "kind": "layout" if changed else "restart", "text": printable(words)}
            changed = False
        elif event["event"] == "spike":
            yield {"step": step, "kind": "spike", "text": f"spike at step {step}"}
    for m in metrics:
        if m.loss is not None and not math.isfinite(m.loss):
            yield {"step": m.step, "kind": "spike", "text": f"the loss is not finite at step {m.step}"}
            break


def curves(runs: Sequence[dict[str, Any]], *, live: bool = False) -> Fragment:
    """Return the figures of runs, each as `describe_curves` describes it.

    Args:
        live: ask the page's server for new values every few seconds (`shoal.report.watch`).
    """
    data = json_script("runs", {"live": live, "runs": list(runs)})
    html = f'{OPTIONS}<div class="charts" id="curves"></div>{data}'
    return Fragment(html, ("curves.css",), ("curves.js",))
