"""`shoal explain optimizers`: paths of the update rules on two small surfaces, and their bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from matplotlib.axes import Axes
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.labs.explain.options import FigureOptions
from shoal.pipeline.from_layout import check_run
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.planning.estimable import check_names
from shoal.report.charts import COLOURS, draw_bars, new_figure, styled, to_svg
from shoal.report.tables import text_table
from shoal.report.timeline.palette import FAINT, INK
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig, build_config
from shoal.spec.config.sections import OptimizerName
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

if TYPE_CHECKING:  # slow import
    from torch import Tensor

Point = tuple[float, float]
NAME = "layers.0.weight"  # makes Muon treat the two weights as a matrix of a layer, with one row


class Surface(NamedTuple):
    """A loss of two weights.

    Attributes:
        loss: [.., 2] -> [..], of a tensor or an array.
        hessian: [2] -> the diagonal of the second derivatives, [2].
        box: area of the drawing (left, bottom, right, top).
        levels: of the contours.
    """

    name: str
    formula: str
    loss: Callable[[Any], Any]
    hessian: Callable[[Tensor], Tensor]
    start: Point
    box: tuple[float, float, float, float]
    levels: tuple[float, ...]


SURFACES = (
    Surface(
        "a narrow valley", "(x² + 20 y²) / 2",
        lambda w: (w[..., 0] ** 2 + 20 * w[..., 1] ** 2) / 2,
        lambda w: w.new_tensor([1.0, 20.0]),
        (-2.0, 0.7), (-2.4, -1.4, 2.4, 1.4), (0.02, 0.1, 0.3, 0.7, 1.3, 2.2, 3.5, 5.5, 8.0, 12.0),
    ),
    Surface(
        "a saddle", "x² / 2 - y² / 2 + y⁴ / 4",
        lambda w: w[..., 0] ** 2 / 2 - w[..., 1] ** 2 / 2 + w[..., 1] ** 4 / 4,
        lambda w: w.new_tensor([1.0, 3 * float(w[1]) ** 2 - 1]),
        (-1.5, 0.01), (-1.9, -0.6, 1.7, 1.8), (-0.24, -0.2, -0.13, -0.05, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5),
    ),
)
"""The valley is flat along x and steep along y. At the saddle the gradient is zero, and the descent is along y: the
start is 0.01 off the ridge, which plain descent leaves late."""


def evaluate(surface: Surface, points: int = 121) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the x and y of a grid over a surface's box, and its loss there [y, x], for contours."""
    left, bottom, right, top = surface.box
    xs, ys = np.linspace(left, right, points), np.linspace(bottom, top, points)
    return xs, ys, surface.loss(np.stack(np.meshgrid(xs, ys), -1))


class RulePath(NamedTuple):
    """The weights before the first step and after each step, and the loss at each of these points."""

    points: list[Point]
    losses: list[float]


def walk(surface: Surface, config: OptimizerConfig, steps: int) -> RulePath:
    """Train two weights. Sophia gets the exact diagonal of the Hessian."""
    import torch  # slow import

    from shoal.engine.optim.build import build
    from shoal.engine.optim.shards import Shards
    from shoal.engine.optim.sophia import Sophia

    weights = torch.tensor([surface.start], dtype=torch.float64)  # [1, 2]
    gradient = torch.zeros_like(weights)
    rule = build(config, Shards.from_parameters([(NAME, weights, gradient)], lambda name, tensor: 0.0))
    points = [surface.start]
    for _ in range(steps):
        with torch.enable_grad():
            point = weights[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(surface.loss(point), point)
        gradient[0].copy_(slope)
        if isinstance(rule, Sophia) and rule.due:
            rule.learn([surface.hessian(weights[0])])
        rule.step(config.learning_rate)
        points.append(tuple(weights[0].tolist()))
    return RulePath(points, surface.loss(torch.tensor(points, dtype=torch.float64)).tolist())


def build_rule(name: str, **settings: Any) -> OptimizerConfig:
    """Return the config of a rule without weight decay; Sophia gets the exact Hessian in every step.

    Args:
        name: of `GROUPS`; "nesterov" is momentum with its variant of the step.

    Raises:
        UsageError: an unknown rule.
    """
    if name not in (known := [each for _, names in GROUPS for each in names]):
        raise UsageError(f"rules {name}: {did_you_mean(name, known)}")
    return OptimizerConfig.model_validate({
        "name": "momentum" if name == "nesterov" else name, "nesterov": name == "nesterov", "weight_decay": 0.0,
        "hessian_every": 1, "hessian_scale": 1.0, **settings,
    })  # fmt: skip


RATES = tuple(factor * 10.0**power for power in (-3, -2, -1) for factor in (1, 2, 5))
GROUPS: tuple[tuple[str, tuple[OptimizerName | Literal["nesterov"], ...]], ...] = (
    ("with and without momentum", ("sgd", "momentum", "nesterov")),
    ("rates by element", ("adagrad", "adam", "radam", "sage")),
    ("factors, matrices, curvature", ("adafactor", "muon", "sophia-g")),
)
"""Rules that share a chart. Left out are AdamW (Adam without decay), 8-bit Adam (full precision for so small a model)
and one of the two estimates of Sophia."""


class OptimizersOptions(FigureOptions):
    """Update rules: their paths and bytes per parameter.

    Over a valley and a saddle, with and without momentum.
    """

    steps: PositiveInt = 60
    """Number of steps."""

    model: str = "llama-3-8b"
    """A model of the catalog, whose states are counted."""

    precision: str = "fp32"
    """Precision of the run: fp32, bf16 (whose states are float32 too), fp64, ...; others are left out."""


def explain(options: OptimizersOptions, console: Console) -> Callable[[], str]:
    """Print the tables. Returns a function that draws the charts."""
    check_names(options.precision, "adamw")
    memory = bytes_per_parameter(options.model, options.precision)
    groups = trace_rules(options.steps)
    console.print(_make_loss_table(groups, options.steps), "")
    rows = [(name, f"{size:.3f}") for name, size in memory.items()]
    title = f"states of {options.model}, {options.precision}"
    console.print(text_table(("rule", "bytes / parameter"), rows, title=title))
    if left_out := [name for name in get_args(OptimizerName) if name not in memory]:
        console.print(f"not supported in this precision: {', '.join(left_out)}")
    return partial(draw, groups, memory, options)


def bytes_per_parameter(model: str, precision: str) -> dict[str, float]:
    """Count the bytes of each rule's states for a parameter of a model on one device, as the cost model does.

    Returns:
        By rule, the smallest first; rules that `shoal train` refuses are left out.

    Raises:
        UsageError: the model is not in the catalog, or no rule trains it.
    """
    shape = model_shape(model)
    parts, refused, counted = [StagePart(range(shape.layers))], [], {}
    for name in get_args(OptimizerName):
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


class TracedRule(NamedTuple):
    """A rule with its learning rate, and its paths over `SURFACES`."""

    name: str
    rate: float
    paths: list[RulePath]


def trace_rules(steps: int) -> list[list[TracedRule]]:
    """Trace the rules of each of `GROUPS`, each with the rate of `RATES` that has the least mean loss in the valley."""
    def total_loss(config: OptimizerConfig) -> float:
        return sum(min(loss, 1e9) for loss in walk(SURFACES[0], config, steps).losses)

    groups = []
    for _, names in GROUPS:
        rules = []
        for name in names:
            best = min((build_rule(name, learning_rate=rate, momentum=0.9) for rate in RATES), key=total_loss)
            rules.append(TracedRule(name, best.learning_rate, [walk(surface, best, steps) for surface in SURFACES]))
        groups.append(rules)
    return groups


# ---- tables ---------------------------------------------------------------------------------------------------------


def _make_loss_table(groups: list[list[TracedRule]], steps: int) -> Table:
    rows: list[list[str]] = []
    for group in groups:
        for rule in group:
            losses = rule.paths[0].losses
            tenth = next((str(n) for n, loss in enumerate(losses) if loss <= losses[0] / 10), "–")
            rows.append([rule.name, f"{rule.rate:g}", *(f"{path.losses[-1]:.2g}" for path in rule.paths), tenth])
        rows.append([])
    names = [surface.name for surface in SURFACES]
    headings = ("rule", "learning rate", *names, f"steps to a tenth in {names[0]}")
    title = f"loss after {steps} steps, with the best rate in the valley"
    return text_table(headings, rows[:-1], title=title, lines=True)


# ---- pictures -------------------------------------------------------------------------------------------------------


@styled
def draw(groups: list[list[TracedRule]], memory: Mapping[str, float], options: OptimizersOptions) -> str:
    """Draw the paths over each surface in a row of charts, and below them the memory as bars."""
    figure, charts = new_figure(
        380 * len(GROUPS), 350 * (len(SURFACES) + 1), rows=len(SURFACES) + 1, columns=len(GROUPS),
        title=f"Update rules: {options.steps} steps from the ring to the dot",
    )  # fmt: skip
    for number in range(len(SURFACES)):
        for (title, _), group in zip(GROUPS, groups, strict=True):
            _draw_paths(charts.pop(0), number, title, group)
    bars, *others = charts
    for axes in others:
        axes.set_visible(False)
    draw_bars(bars, [""], [(name, [size], f"{size:.3g}") for name, size in memory.items()])
    bars.set_title(f"Bytes of optimizer state per parameter:\n{options.model}, {options.precision}")
    return to_svg(figure)


def _draw_paths(axes: Axes, number: int, title: str, group: list[TracedRule]) -> None:
    surface = SURFACES[number]
    left, bottom, right, top = surface.box
    axes.contour(*evaluate(surface), levels=surface.levels, colors=FAINT, linewidths=0.6, alpha=0.6, linestyles="solid")
    for rule, colour in zip(group, COLOURS, strict=False):
        x, y = zip(*rule.paths[number].points, strict=True)
        axes.plot(x, y, color=colour, marker=".", linewidth=1.4, label=f"{rule.name}, learning rate {rule.rate:g}")
        axes.plot(x[-1], y[-1], "o", color=colour, markersize=7)
    axes.plot(*surface.start, "o", color=INK, markerfacecolor="white", markersize=7)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.set_title(f"{surface.name}: {title}\n{surface.formula}", size=9)
    axes.grid(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.08))
