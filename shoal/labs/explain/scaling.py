"""`shoal explain scaling`: what loss a budget buys and with which model; years of famous trainings on one device.

Kaplan et al. 2020 ("Scaling Laws for Neural Language Models"): N without embeddings, loss in nats per token. Hoffmann
et al. 2022 ("Training Compute-Optimal Large Language Models"): N with all parameters. Besiroglu et al. 2024
("Chinchilla Scaling: A replication attempt"): a new fit to the same runs. Their losses are on different data and
tokenizers, and cannot be compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field, PositiveFloat
from rich.console import Console
from rich.table import Table

from shoal.base.units import DAY, show_number
from shoal.labs.explain.options import FigureOptions
from shoal.planning.cost.flops import dollars, petaflop_days
from shoal.report.charts import draw_lines, new_figure, to_svg
from shoal.report.tables import text_table
from shoal.spec.catalog import accelerators


class Allocation(NamedTuple):
    """Optimal use of a compute budget: parameters N, tokens T and the predicted loss [nats per token]."""

    parameters: float
    tokens: float
    loss: float


def kaplan_optimum(flops: float) -> Allocation:
    """Return the optimal size for a budget: N = 1.3e9 PF-days^0.73, and data use the rest (section 6.1).

    The loss is (3.1e8 / PF-days)^0.050 (equation 1.3), in one pass over the data. The budget is their C_min, the
    compute with batches far below the critical size; with batches of that size the compute and tokens double (equation
    5.5).
    """
    parameters, days = 1.3e9 * petaflop_days(flops) ** 0.73, petaflop_days(flops)
    return Allocation(parameters, flops / (6 * parameters), (3.1e8 / days) ** 0.050)


@dataclass(frozen=True)
class Parametric:
    """L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, equation 10).

    E is the irreducible loss; the other terms are the costs of finite model size and finite data.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss [nats per token]."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> Allocation:
        """Return the optimum for C = 6 N T: N = G (C/6)^a, T = (C/6)^b / G (Hoffmann et al. 2022, equation 4)."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters, tokens = g * (flops / 6) ** (self.beta / both), (flops / 6) ** (self.alpha / both) / g
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


CHINCHILLA = Parametric(1.6934, 406.4, 410.7, 0.3392, 0.2849)
"""Approach 3 of Hoffmann et al., with the digits of the paper's source (Besiroglu et al. 2024, table 1).

The printed exponents, 0.34 and 0.28, give a different optimum. For Gopher's budget the optimum is 40 B parameters;
approaches 1 and 2, and so the rule of 20 tokens per parameter, give 70 B.

>>> round(CHINCHILLA.loss(70e9, 1.4e12), 2), round(CHINCHILLA.loss(280e9, 300e9), 2)  # Chinchilla, Gopher
(1.92, 1.97)
"""
REFITTED = Parametric(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The same law refitted to the points of the paper's figure 4 (Besiroglu et al. 2024, table 1): about 20 tokens per
parameter, as in approaches 1 and 2."""


def twenty_tokens(flops: float) -> Allocation:
    """Allocate by the rule of 20 tokens per parameter (Hoffmann et al. 2022, table 3): C = 120 N^2.

    >>> f"{twenty_tokens(5.88e23).parameters:.3g}"
    '7e+10'
    """
    parameters = (flops / 120) ** 0.5
    return Allocation(parameters, 20 * parameters, CHINCHILLA.loss(parameters, 20 * parameters))


def six_n_t(parameters: float, tokens: float) -> float:
    """Estimate FLOPs as C = 6 N T (Kaplan et al. 2020, section 2.1): 2 for a multiply-add, times 3.

    >>> f"{six_n_t(175e9, 300e9):.3g}"
    '3.15e+23'
    """
    return 6 * parameters * tokens


def training_seconds(flops: float, rate: float, devices: int = 1, utilisation: float = 1.0) -> float:
    """Return the seconds at ``rate`` FLOP/s of a device and a fraction of it, the MFU for FLOPs of the model."""
    return flops / (rate * devices * utilisation)


YEAR = 365 * DAY
LAWS = {
    "Kaplan": kaplan_optimum, "Chinchilla": CHINCHILLA.optimum, "the same, refitted": REFITTED.optimum,
    "20 tokens each": twenty_tokens,
}  # fmt: skip
TRAININGS = {
    "GPT-3": six_n_t(175e9, 499e9),  # Brown et al. 2020, table 2.2: the data set's tokens; 300e9 were trained on
    "Llama-3 405B": six_n_t(405e9, 15.6e12),  # Dubey et al. 2024, table 3 and section 3.2.1
}
"""FLOPs."""


class ScalingOptions(FigureOptions):
    """Scaling laws, and years of famous trainings on one device.

    Loss and best size for a budget; years and dollars of GPT-3 and Llama 3 on one of each device.
    """

    flops: tuple[PositiveFloat, ...] = (1e19, 1e21, 5.88e23, 3.79e25)
    """Budgets, in FLOPs; 5.88e23 is Chinchilla's, 3.79e25 that of Llama 3 405B."""

    utilisation: float = Field(1.0, gt=0, le=1)
    """Part of the peak that a training reaches (MFU)."""


def explain(options: ScalingOptions, console: Console) -> Callable[[], str]:
    """Print the tables. Returns a function that draws loss, parameters and tokens of the best model over the budget."""
    console.print(_budgets(options), "")
    console.print("Losses are of each law's own data and tokenizer, and cannot be compared between laws. Kaplan's "
                  "parameters are without embeddings.\n")  # fmt: skip
    console.print(_devices(options))
    return draw


def draw() -> str:
    """Draw the parameters of the best model, and its loss, over the budget, by each law."""
    budgets = [10.0 ** (k / 2) for k in range(36, 53)]
    optima = {name: [(flops, law(flops)) for flops in budgets] for name, law in LAWS.items()}
    figure, (sizes, losses) = new_figure(860, 640, rows=2)
    axis = ("FLOPs", "{:.0e}".format)
    draw_lines(sizes, "Parameters of the best model",
               {name: [(flops, best.parameters) for flops, best in found] for name, found in optima.items()},
               x=axis, y=("", "{:.0e}".format))  # fmt: skip
    draw_lines(losses, "Its loss, in nats per token of each law's own data",
               {name: [(flops, best.loss) for flops, best in found] for name, found in optima.items()},
               x=axis, y=("", "{:g}".format))  # fmt: skip
    return to_svg(figure)


def _budgets(options: ScalingOptions) -> Table:
    rows = []
    for flops in options.flops:
        shown = (f"{flops:.3g}", show_number(petaflop_days(flops)))
        for name, law in LAWS.items():
            n, t, loss = law(flops)
            numbers = (f"{n:.3g}", f"{t:.3g}", f"{t / n:.3g}", f"{loss:.3f}")
            rows.append((*shown, name, *numbers))
            shown = ("", "")
    headings = ("budget", "petaFLOP/s-days", "law", "parameters", "tokens", "tokens each", "loss")
    return text_table(headings, rows, title="the best model for a budget", gap=1)


def _devices(options: ScalingOptions) -> Table:
    rows = []
    for name, machine in accelerators().items():
        dense, (of, rate) = machine.dense_flops(machine.half), machine.printed
        rows.append([f"{name}, {machine.half}", *_row(dense, options.utilisation, machine.dollars_per_hour)])
        if rate != dense:
            rows.append([f"  as printed, {of}", *_row(rate, options.utilisation)])
    columns = [text for name in TRAININGS for text in (f"{name}, years", "M$")]
    title = f"a training on one device at {100 * options.utilisation:g} % of its dense peak"
    return text_table(["", "TFLOP/s", *columns], rows, title=title)


def _row(rate: float, utilisation: float, price: float | None = None) -> list[str]:
    row = [_show(rate / 1e12)]
    for flops in TRAININGS.values():
        seconds = training_seconds(flops, rate, utilisation=utilisation)
        row += [_show(seconds / YEAR), _show(dollars(seconds, 1, price) / 1e6) if price else ""]
    return row


def _show(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"

