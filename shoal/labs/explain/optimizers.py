"""`shoal explain optimizers`: paths of the update rules on two small surfaces, and their bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.engine.optim.build import RULES
from shoal.labs.explain.surfaces import SURFACES, RulePath, Surface, find_best_rate, walk
from shoal.pipeline.from_layout import check_run
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.report.charts import COLOURS, draw_bars, new_figure, styled, to_svg
from shoal.report.svg import FAINT, INK
from shoal.report.tables import text_table
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig, build_config
from shoal.spec.config.sections import OptimizerName
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

GROUPS: tuple[tuple[str, tuple[OptimizerName | Literal["nesterov"], ...]], ...] = (
    ("with and without momentum", ("sgd", "momentum", "nesterov")),
    ("rates by element", ("adagrad", "adam", "radam", "sage")),
    ("factors, matrices, curvature", ("adafactor", "muon", "sophia-g")),
)
"""Rules that share a chart. Left out are AdamW (Adam without decay), 8-bit Adam (full precision for so small a model)
and one of the two estimates of Sophia."""


class OptimizersOptions(Section):
    """Update rules: their ways over a valley and a saddle, with and without momentum, and their bytes per parameter."""

    steps: PositiveInt = 60
    """Number of steps."""

    momentum: float = 0.9
    """Momentum of momentum, nesterov and muon, from 0 to below 1."""

    model: str = "llama-3-8b"
    """A model of the catalog, whose states are counted."""

    precision: str = "fp32"
    """Precision of the run: fp32, bf16 (whose states are float32 too), fp64, ...; others are left out."""

    out: Path | None = None
    """Also draw it all to this file, .svg."""


def explain(options: OptimizersOptions, console: Console) -> Callable[[], str]:
    """Print the tables. Returns a function that draws the charts."""
    if not 0 <= options.momentum < 1:
        raise UsageError(f"--momentum {options.momentum}: must be from 0 to below 1.")
    if options.precision not in FORMATS:
        raise UsageError(f"--precision {options.precision}: {did_you_mean(options.precision, FORMATS)}")
    memory = bytes_per_parameter(options.model, options.precision)
    ways = {surface.name: trace_rules(surface, options.steps, options.momentum) for surface in SURFACES}
    console.print(_ways_table(ways, options.steps), "")
    rows = [(name, f"{size:.3f}") for name, size in memory.items()]
    title = f"states of {options.model}, {options.precision}"
    console.print(text_table(("rule", "bytes / parameter"), rows, title=title))
    if left_out := [name for name in RULES if name not in memory]:
        console.print(f"not supported in this precision: {', '.join(left_out)}")
    return partial(draw, ways, memory, options)


def bytes_per_parameter(model: str, precision: str) -> dict[str, float]:
    """Count the bytes of each rule's states for a parameter of a model on one device, as the cost model does.

    Returns:
        By rule, the smallest first; rules that `shoal train` refuses are left out.

    Raises:
        UsageError: the model is not in the catalog, or no rule trains it.
    """
    shape = model_shape(model)
    parts, refused, counted = [StagePart(range(shape.layers))], [], {}
    for name in RULES:
        try:
            check_run(build_config({"train": {"precision": precision}, "optimizer": {"name": name}}), shape)
        except UsageError as error:
            refused.append(error)
            continue
        state = state_bytes(shape, Layout(), FORMATS[precision], name, parts)
        counted[name] = state.optimizer / state.elements
    if not counted:
        raise refused[0]
    return dict(sorted(counted.items(), key=lambda item: (item[1], item[0])))


def trace_rules(surface: Surface, steps: int, momentum: float) -> list[list[RulePath]]:
    """Return the paths of the rules of each of `GROUPS`, each with its best learning rate in the valley."""
    groups = []
    for _, names in GROUPS:
        ways = []
        for name in names:
            config = OptimizerConfig(
                name="momentum" if name == "nesterov" else name, nesterov=name == "nesterov", momentum=momentum,
                weight_decay=0.0, hessian_every=1, hessian_scale=1.0,
            )
            rate = find_best_rate(SURFACES[0], config, steps)
            ways.append(walk(surface, config.model_copy(update={"learning_rate": rate}), steps, name))
        groups.append(ways)
    return groups


# ---- tables ---------------------------------------------------------------------------------------------------------


def _ways_table(ways: Mapping[str, list[list[RulePath]]], steps: int) -> Table:
    names = list(ways)
    rows = []
    for groups in zip(*ways.values(), strict=True):
        for same in zip(*groups, strict=True):  # the paths of one rule, over each surface
            first = same[0]
            there = next((str(n) for n, loss in enumerate(first.losses) if loss <= first.losses[0] / 10), "–")
            rows.append([first.label, f"{first.rate:g}", *(f"{way.losses[-1]:.2g}" for way in same), there])
        rows.append([])
    headings = ("rule", "learning rate", *names, f"steps to a tenth in {names[0]}")
    title = f"loss after {steps} steps, with the best rate in the valley"
    return text_table(headings, rows[:-1], title=title, lines=True)


# ---- pictures -------------------------------------------------------------------------------------------------------


@styled
def draw(ways: Mapping[str, list[list[RulePath]]], memory: Mapping[str, float], options: OptimizersOptions) -> str:
    """Draw the paths over each surface in a row of charts, and below them the memory as bars."""
    figure, charts = new_figure(
        380 * len(GROUPS), 350 * (len(SURFACES) + 1), rows=len(SURFACES) + 1, columns=len(GROUPS),
        title=f"Update rules: {options.steps} steps from the ring to the dot",
    )  # fmt: skip
    for surface in SURFACES:
        for (title, _), group in zip(GROUPS, ways[surface.name], strict=True):
            _draw_ways(charts.pop(0), surface, title, group)
    bars, *others = charts
    for axes in others:
        axes.set_visible(False)
    draw_bars(bars, [""], [(name, [size], f"{size:.3g}") for name, size in memory.items()])
    bars.set_title(f"Bytes of optimizer state per parameter:\n{options.model}, {options.precision}")
    return to_svg(figure)


def _draw_ways(axes: Axes, surface: Surface, title: str, group: Sequence[RulePath]) -> None:
    left, bottom, right, top = surface.box
    xs, ys = torch.linspace(left, right, 121), torch.linspace(bottom, top, 121)
    losses = surface.loss(torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1))  # [y, x]
    axes.contour(xs, ys, losses, levels=surface.levels, colors=FAINT, linewidths=0.6, alpha=0.6, linestyles="solid")
    for way, colour in zip(group, COLOURS, strict=False):
        x, y = zip(*way.points, strict=True)
        axes.plot(x, y, color=colour, marker=".", linewidth=1.4, label=f"{way.label}, learning rate {way.rate:g}")
        axes.plot(x[-1], y[-1], "o", color=colour, markersize=7)
    axes.plot(*surface.start, "o", color=INK, markerfacecolor="white", markersize=7)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.set_title(f"{surface.name}: {title}\n{surface.formula}", size=9)
    axes.grid(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.08))
