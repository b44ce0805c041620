"""Charts of a run's metrics over its steps, for its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from matplotlib.ticker import MaxNLocator

from shoal.report.charts import COLOURS, Points, new_figure, styled, to_svg
from shoal.training.records.metrics import StepMetrics


def draw_curves(metrics: Sequence[StepMetrics]) -> str:
    """Draw loss (with validation as dots), throughput, gradient norm and memory of a run, as far as recorded."""

    def points(read: Callable[[StepMetrics], float | None]) -> Points:
        return [(m.step, value) for m in metrics if (value := read(m)) is not None]

    charts = {
        "gradient norm, before clipping": points(lambda m: m.gradient_norm),  # None in skipped steps
        "loss scale": points(lambda m: m.loss_scale),
        "staleness of updates, mean": points(lambda m: m.staleness),
        "peak memory of the fullest rank, MiB": points(lambda m: m.memory_bytes / 2**20),
    }
    drawn = [
        _draw("loss per token (dots: validation)", points(lambda m: m.loss), points(lambda m: m.validation_loss)),
        _draw("tokens per second", points(lambda m: m.tokens_per_second), from_zero=True),
        *(_draw(title, line, from_zero=True) for title, line in charts.items() if line),
    ]
    return f'<div class="charts">{"".join(drawn)}</div>'


@styled
def _draw(title: str, line: Points, dots: Points = (), *, from_zero: bool = False) -> str:
    figure, (axes,) = new_figure(420, 200)
    axes.plot(*zip(*line, strict=True), color=COLOURS[0], marker="o" if len(line) == 1 else "")
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color=COLOURS[1])
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawn = to_svg(figure, inline=True, title=f"{title} by step")
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"
