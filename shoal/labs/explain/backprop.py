"""`shoal explain backprop`: gradient descent on a network small enough to check by hand, on one rank or several.

The network is y = w1 x1 + w2 x2 + ... + b with the loss (y - target)²; PyTorch's autograd computes its gradients. Ranks
begin with rank 0's parameters and average their gradients, as DDP does (Li et al. 2020, "PyTorch Distributed").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.units import parse_numbers
from shoal.labs.explain.options import FigureOptions
from shoal.report.charts import hide_frame, new_figure, styled, to_svg
from shoal.report.tables import text_table
from shoal.report.timeline.palette import FAINT, INK

MOST_INPUTS, MOST_RANKS = 4, 8
VALUE, GRADIENT = "#2563eb", "#c2410c"  # colours


class BackpropOptions(FigureOptions):
    """A network by hand: its values, gradients and updates.

    The price of a house from its bedrooms and bathrooms, by gradient descent; on several ranks, data parallelism.
    """

    samples: tuple[str, ...] = ("6,2,15", "5,2,12")
    """Samples, each its inputs and its target: 6,2,15 is a house with 6 bedrooms, 2 bathrooms and the price 15."""

    weights: str = "0.773,0.321,0.067"
    """The weight of each input, and the bias."""

    rate: PositiveFloat = 1e-3
    """Learning rate."""

    accumulate: PositiveInt = 1
    """Samples whose gradients a rank adds up before an update."""

    ranks: PositiveInt = 1
    """Data-parallel ranks, which take the samples in turn."""


class Pass(NamedTuple):
    """A forward and a backward pass of one sample.

    Attributes:
        sample: inputs and target.
        products: w1 x1, w2 x2, ...
        slope: the loss's derivative by y; it is also the derivative by each product.
        gradient: the derivatives by each weight and by the bias.
    """

    rank: int
    sample: list[float]
    products: list[float]
    y: float
    loss: float
    slope: float
    gradient: list[float]


class Update(NamedTuple):
    """One step: the parameters before it, the passes of all ranks, their mean gradient, the parameters after it."""

    before: list[float]
    passes: list[Pass]
    gradients: list[list[float]]
    mean: list[float]
    after: list[float]


def run_pass(rank: int, parameters: list[float], sample: list[float]) -> Pass:
    """Run a sample through the network and back, in float64."""
    import torch  # slow import

    held = torch.tensor(parameters, dtype=torch.float64, requires_grad=True)
    products = held[:-1] * torch.tensor(sample[:-1], dtype=torch.float64)
    y = products.sum() + held[-1]
    loss = (y - sample[-1]) ** 2
    slope, gradient = torch.autograd.grad(loss, (y, held))
    return Pass(rank, sample, products.tolist(), y.item(), loss.item(), slope.item(), gradient.tolist())


def descend(parameters: list[float], samples: list[list[float]], options: BackpropOptions) -> Iterator[Update]:
    """Yield the updates: a rank adds up the gradients of its samples; an update takes the mean over ranks."""
    ranks, taken = options.ranks, options.ranks * options.accumulate
    for first in range(0, len(samples), taken):
        passes = [run_pass(i % ranks, parameters, sample) for i, sample in enumerate(samples[first : first + taken])]
        gradients = [
            [sum(each) for each in zip(*(one.gradient for one in passes if one.rank == rank), strict=True)]
            for rank in range(ranks)
        ]
        mean = [sum(each) / ranks for each in zip(*gradients, strict=True)]
        after = [value - options.rate * slope for value, slope in zip(parameters, mean, strict=True)]
        yield Update(parameters, passes, gradients, mean, after)
        parameters = after


def explain(options: BackpropOptions, console: Console) -> Callable[[], str]:
    """Print every pass and every update. Returns a function that draws the graph of the first pass."""
    parameters, samples = _check(options)
    names = [*(f"w{i}" for i in range(1, len(parameters))), "b"]
    terms = " + ".join(f"w{i} x{i}" for i in range(1, len(parameters)))
    console.print(f"y = {terms} + b, loss = (y - target)², learning rate {options.rate:g}", highlight=False)
    if options.ranks > 1:
        console.print("Rank 0 sends its parameters to all ranks (broadcast). Each works on samples of its own.")
    updates = [*descend(parameters, samples, options)]
    for number, update in enumerate(updates, 1):
        console.print(f"\n[bold]step {number}[/]", highlight=False)
        console.print(_tabulate_passes(update, names))
        console.print(_tabulate_update(update, names))
    if options.ranks > 1:
        firsts = ",".join(f"{gradient[0]:.6g}" for gradient in updates[0].gradients)
        command = f"shoal explain all-reduce --ranks {options.ranks} --algorithm tree --values {firsts}"
        console.print(f"The sum is an all-reduce, here of dl/d{names[0]}: {command}", highlight=False, soft_wrap=True)
    return partial(draw, updates[0], names)


def _check(options: BackpropOptions) -> tuple[list[float], list[list[float]]]:
    """Return the parameters and the samples.

    Raises:
        UsageError: unequal numbers of weights and inputs, or samples that do not fill each step.
    """
    parameters = parse_numbers(options.weights, where="--weights")
    samples = [parse_numbers(text, where="--samples") for text in options.samples]
    if not 2 <= len(parameters) <= MOST_INPUTS + 1:
        raise UsageError(f"--weights {options.weights}: give 1 to {MOST_INPUTS} weights and the bias")
    for text, sample in zip(options.samples, samples, strict=True):
        if len(sample) != len(parameters):
            raise UsageError(
                f"--samples {text}: give {len(parameters) - 1} inputs and the target; there are {len(parameters) - 1} "
                "weights and the bias (--weights)"
            )
    if options.ranks > MOST_RANKS:
        raise UsageError(f"--ranks {options.ranks}: each rank is printed; at most {MOST_RANKS}")
    taken = options.ranks * options.accumulate
    if not samples or len(samples) % taken:
        raise UsageError(
            f"--samples: {len(samples)} do not fill steps of --ranks {options.ranks} x --accumulate "
            f"{options.accumulate} = {taken} samples; give a multiple of {taken}"
        )
    return parameters, samples


def _show(value: float) -> str:
    """Return a number with four digits after the point, without zeros at its end; three digits of a tiny one."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def _tabulate_passes(update: Update, names: list[str]) -> Table:
    """Tabulate the passes in 80 columns: without dl/db, which is dl/dy and a gradient of the next table."""
    products = [f"{name} x{name[1:]}" for name in names[:-1]]
    headings = ("rank", "inputs", "target", *products, "y", "loss", "dl/dy", *(f"dl/d{name}" for name in names[:-1]))
    rows = []
    for one in update.passes:
        *inputs, target = map(_show, one.sample)
        numbers = (*one.products, one.y, one.loss, one.slope, *one.gradient[:-1])
        rows.append([f"{one.rank}", ", ".join(inputs), target, *map(_show, numbers)])
    return text_table(headings, rows, words=(0, 1), gap=1)


def _tabulate_update(update: Update, names: list[str]) -> Table:
    ranks = len(update.gradients)
    several = ("sum", "mean") if ranks > 1 else ()
    gradient = [f"rank {rank}" for rank in range(ranks)] if several else ["gradient"]
    rows = []
    for i, name in enumerate(names):
        own = [each[i] for each in update.gradients]
        numbers = (update.before[i], *own, *((sum(own), update.mean[i]) if several else ()), update.after[i])
        rows.append([name, *map(_show, numbers)])
    return text_table(("", "value", *gradient, *several, "updated"), rows)


# ---- figure: the graph of a pass; values over the nodes, the loss's derivatives below --------------------------------


@styled
def draw(update: Update, names: list[str]) -> str:
    """Draw the computational graph of a step's first pass, from the inputs to the loss."""
    one, weights = update.passes[0], update.before
    inputs, rows = one.sample[:-1], 2 * len(names)
    figure, (axes,) = new_figure(
        760, 60 + 66 * rows, title="One forward and one backward pass\nBlue: values, forward. Orange: derivatives of "
        "the loss, backward."
    )  # fmt: skip
    middle = (rows - 1) / 2
    y, loss = (2.6, middle), (3.8, middle)
    for i, value in enumerate(inputs):
        product = (1.3, 2 * i + 0.5)
        slope = one.gradient[i]
        _draw_node(axes, (0.0, 2 * i), f"x{i + 1}", value, None, product)
        _draw_node(axes, (0.0, 2 * i + 1), names[i], weights[i], slope, product)
        _draw_node(axes, product, f"{names[i]} x{i + 1}", one.products[i], one.slope, y)
    _draw_node(axes, (1.3, rows - 1.5), "b", weights[-1], one.gradient[-1], y)
    _draw_node(axes, y, "y", one.y, one.slope, loss)
    _draw_node(axes, (2.6, middle - 1.5), "target", one.sample[-1], None, loss)
    _draw_node(axes, loss, "loss", one.loss, 1.0)
    axes.set(xlim=(-0.5, 4.3), ylim=(rows - 0.8, -0.7))
    hide_frame(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    return to_svg(figure)


def _draw_node(
    axes: Axes, at: tuple[float, float], name: str, value: float, slope: float | None,
    to: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """Draw a node with its value and derivative, and an arrow to the node that uses it."""
    x, y = at
    if to:
        axes.annotate("", (to[0] - 0.27, to[1]), (x + 0.25, y), arrowprops={"arrowstyle": "-|>", "color": FAINT})
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": FAINT}
    axes.text(x, y, name, ha="center", va="center", color=INK, bbox=box, weight="bold")
    axes.text(x, y - 0.38, _show(value), ha="center", va="center", color=VALUE, size=8)
    if slope is not None:
        axes.text(x, y + 0.4, _show(slope), ha="center", va="center", color=GRADIENT, size=8)
