"""`shoal explain scaling`: what loss a budget buys and with which model; years of famous trainings on one device."""

from __future__ import annotations

from pydantic import Field, PositiveFloat
from rich.console import Console
from rich.table import Table

from shoal.base.section import Section
from shoal.planning.cost.flops import YEAR, dollars, petaflop_days, six_n_t, training_seconds
from shoal.planning.cost.scaling import CHINCHILLA, REFITTED, Allocation, kaplan_optimum, twenty_tokens
from shoal.report.tables import text_table
from shoal.spec.catalog import accelerators

LAWS = {
    "Kaplan": kaplan_optimum, "Chinchilla": CHINCHILLA.optimum, "the same, refitted": REFITTED.optimum,
    "20 tokens each": twenty_tokens,
}  # fmt: skip
TRAININGS = {
    "GPT-3": six_n_t(175e9, 499e9),  # Brown et al. 2020, table 2.2: the data set's tokens; 300e9 were trained on
    "Llama-3 405B": six_n_t(405e9, 15.6e12),  # Dubey et al. 2024, table 3 and section 3.2.1
}
"""FLOPs."""


class ScalingOptions(Section):
    """Scaling laws: loss and best size for a budget; years and dollars of GPT-3 and Llama 3 on one of each device."""

    flops: tuple[PositiveFloat, ...] = (1e19, 1e21, 5.88e23, 3.79e25)
    """Budgets, in FLOPs; 5.88e23 is Chinchilla's, 3.79e25 that of Llama 3 405B."""

    utilisation: float = Field(1.0, gt=0, le=1)
    """Part of the peak that a training reaches (MFU)."""


def explain(options: ScalingOptions, console: Console) -> None:
    """Print the tables."""
    console.print(_budgets(options), "")
    console.print("Losses are of each law's own data and tokenizer, and cannot be compared between laws. Kaplan's "
                  "parameters are without embeddings.\n")  # fmt: skip
    console.print(_devices(options))


def _budgets(options: ScalingOptions) -> Table:
    rows = []
    for flops in options.flops:
        shown = (f"{flops:.3g}", f"{petaflop_days(flops):,.3g}")
        for name, law in LAWS.items():
            best: Allocation = law(flops)
            each = best.tokens / best.parameters
            numbers = (f"{best.parameters:.3g}", f"{best.tokens:.3g}", f"{each:.3g}", f"{best.loss:.3f}")
            rows.append((*shown, name, *numbers))
            shown = ("", "")
    headings = ("budget", "petaFLOP/s-days", "law", "parameters", "tokens", "tokens each", "loss")
    return text_table(headings, rows, title="the best model for a budget")


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
    """Three digits of small numbers, all before the point of large ones."""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"

