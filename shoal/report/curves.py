"""Small line charts of a run's numbers over its steps, as SVG inside a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from shoal.report.page import Fragment
from shoal.report.timeline.chart import ticks
from shoal.training.records.metrics import StepMetrics

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 190, 52, 22, 8
Points = Sequence[tuple[float, float]]


def curves(metrics: Sequence[StepMetrics]) -> Fragment:
    """Loss (with validation as dots), throughput, gradient norm and memory of a run."""
    def points(of: Callable[[StepMetrics], float | None]) -> Points:
        return [(m.step, value) for m in metrics if (value := of(m)) is not None]

    norms, scales = points(lambda m: m.gradient_norm), points(lambda m: m.loss_scale)  # of skipped steps there is none
    stale = points(lambda m: m.staleness)
    drawn = [
        _chart("loss per token (dots: validation)", points(lambda m: m.loss), points(lambda m: m.validation_loss)),
        _chart("tokens per second", points(lambda m: m.tokens_per_second), zero=True),
        *([_chart("gradient norm, before clipping", norms, zero=True)] if norms else []),
        *([_chart("loss scale", scales, zero=True)] if scales else []),
        *([_chart("staleness of updates, mean", stale, zero=True)] if stale else []),
        _chart("peak memory of the fullest rank, MiB", points(lambda m: m.memory_bytes / 2**20), zero=True),
    ]
    return Fragment(f'<div class="charts">{"".join(drawn)}</div>')


def _chart(title: str, line: Points, dots: Points = (), *, zero: bool = False) -> str:
    """One chart; ``zero`` begins its axis there."""
    xs, ys = ([p[i] for p in (*line, *dots)] for i in (0, 1))
    low, high = (0.0 if zero else min(ys)), max(ys)
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    else:
        low, high = (low if zero else low - 0.05 * (high - low)), high + 0.05 * (high - low)
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) * (WIDTH - LEFT - 8)
        return round(LEFT + across, 2), round(TOP + (high - y) / (high - low) * (HEIGHT - BOTTOM - TOP), 2)

    marks = []
    for value in ticks(low, high, 4):
        y = at(first, value)[1]
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{LEFT - 7}" y="{y + 4}" text-anchor="end">{value:,.6g}</text>')
    for value in ticks(first, last, 6):
        if value == int(value):
            marks.append(f'<text x="{at(value, low)[0]}" y="{HEIGHT - 4}" text-anchor="middle">{value:.0f}</text>')
    path = " ".join(f"{x},{y}" for x, y in (at(*p) for p in line))
    marks.append(f'<polyline class="curve" points="{path}"/>')
    for step, value in dots:
        x, y = at(step, value)
        marks.append(f'<circle class="dot" cx="{x}" cy="{y}" r="4"><title>step {step}: {value:.4f}</title></circle>')
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)} by step">{"".join(marks)}</svg></figure>'
    )
