"""`shoal explain optimizers`: where the update rules go on two small surfaces, and what each keeps per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.engine.optim.build import RULES
from shoal.labs.explain.surfaces import SURFACES, Surface, Way, best_rate, walk
from shoal.pipeline.check_run import check_run
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.report.charts import COLOURS, draw_bars, new_figure, styled, to_svg
from shoal.report.svg import FAINT, INK
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig, build_config
from shoal.spec.config.optimizer import OptimizerName
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

GROUPS: tuple[tuple[str, tuple[OptimizerName | Literal["nesterov"], ...]], ...] = (
    ("with and without momentum", ("sgd", "momentum", "nesterov")),
    ("rates by element", ("adagrad", "adam", "radam", "sage")),
    ("factors, matrices, curvature", ("adafactor", "muon", "sophia-g")),
)
"""What shares a picture. AdamW without decay is Adam, and 8-bit Adam keeps so few moments in full precision; the
two of Sophia differ in their estimates alone."""


class OptimizersOptions(Section):
    """Update rules: their ways over a valley and a saddle, with and without momentum, and their bytes per parameter."""

    steps: PositiveInt = 60
    """Of each way."""

    momentum: float = 0.9
    """Of momentum, nesterov and muon, from 0 to below 1."""

    model: str = "llama-3-8b"
    """A model of the catalog, whose states are counted."""

    precision: str = "fp32"
    """Of the run: fp32, bf16 (whose states are float32 too), fp64, ...; what is not trained with it is left out."""

    out: Path | None = None
    """Also draw it all to this file, .svg."""


def explain(options: OptimizersOptions, console: Console) -> int:
    """Print the tables and draw the pictures.

    Raises:
        UsageError: bad options.
    """
    _check(options)
    memory = bytes_per_parameter(options.model, options.precision)
    ways = {surface.name: ways_over(surface, options.steps, options.momentum) for surface in SURFACES}
    console.print(_ways_table(ways, options.steps))
    console.print(_memory_table(memory, options))
    if options.out:
        options.out.write_text(draw(ways, memory, options), encoding="utf-8")
        console.print(f"drawn: {options.out}")
    return 0


def _check(options: OptimizersOptions) -> None:
    if not 0 <= options.momentum < 1:
        raise UsageError(f"--momentum {options.momentum}: a decay rate, from 0 to below 1.")
    if options.precision not in FORMATS:
        raise UsageError(f"--precision {options.precision}: {did_you_mean(options.precision, FORMATS)}")
    check_writable(options.out, "--out", ".svg")


def bytes_per_parameter(model: str, precision: str) -> dict[str, float]:
    """By rule, bytes of its states for a parameter of a model on one device, as the cost model counts them; of those
    rules that `shoal train` takes.

    Raises:
        UsageError: there is no such model in the catalog, or it is trained with none.
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
    return counted


def ways_over(surface: Surface, steps: int, momentum: float) -> list[list[Way]]:
    """For each of `GROUPS` the ways of its rules, each with the learning rate that is best for it in the valley."""
    groups = []
    for _, names in GROUPS:
        ways = []
        for name in names:
            config = OptimizerConfig(
                name="momentum" if name == "nesterov" else name, nesterov=name == "nesterov", momentum=momentum,
                weight_decay=0.0, hessian_every=1, hessian_scale=1.0,
            )
            rate = best_rate(SURFACES[0], config, steps)
            ways.append(walk(surface, config.model_copy(update={"learning_rate": rate}), steps, name))
        groups.append(ways)
    return groups


# ---- tables ---------------------------------------------------------------------------------------------------------


def _ways_table(ways: Mapping[str, list[list[Way]]], steps: int) -> Table:
    names = list(ways)
    table = Table(title=f"loss after {steps} steps, with the rate that is best in the valley", title_justify="left")
    for heading in ("rule", "learning rate", *names, *(f"steps to a tenth in {name}" for name in names[:1])):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for group in range(len(GROUPS)):
        for i, first in enumerate(ways[names[0]][group]):
            ends = [f"{ways[name][group][i].losses[-1]:.2g}" for name in names]
            there = next((str(n) for n, loss in enumerate(first.losses) if loss <= first.losses[0] / 10), "–")
            table.add_row(first.label, f"{first.rate:g}", *ends, there)
        table.add_section()
    return table


def _memory_table(memory: Mapping[str, float], options: OptimizersOptions) -> Table:
    title = f"states of {options.model}, {options.precision}"
    table = Table(title=title, title_justify="left")
    table.add_column("rule")
    table.add_column("bytes / parameter", justify="right")
    for name, size in sorted(memory.items(), key=lambda item: (item[1], item[0])):
        table.add_row(name, f"{size:.3f}")
    if left_out := [name for name in RULES if name not in memory]:
        table.caption, table.caption_justify = f"not trained so: {', '.join(left_out)}", "left"
    return table


# ---- pictures -------------------------------------------------------------------------------------------------------


@styled
def draw(ways: Mapping[str, list[list[Way]]], memory: Mapping[str, float], options: OptimizersOptions) -> str:
    """Draw the ways over each surface in a row of charts, and under them the memory as bars."""
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
    sizes = sorted(memory.items(), key=lambda item: (item[1], item[0]))
    draw_bars(bars, [""], [(name, [size], f"{size:.3g}") for name, size in sizes])
    bars.set_title(f"Bytes of optimizer state per parameter:\n{options.model}, {options.precision}")
    return to_svg(figure)


def _draw_ways(axes: Axes, surface: Surface, title: str, group: Sequence[Way]) -> None:
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
