"""`shoal explain precision`: what each number format holds, and the memory of a parameter in each precision."""

from __future__ import annotations

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.section import Section
from shoal.planning.cost.memory.per_parameter import RECIPES, PerParameter, per_parameter
from shoal.spec.number_formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, Format

SHORT = {FP64: "fp64", FP32: "fp32", FP16: "fp16", BF16: "bf16", E4M3: "e4m3", E5M2: "e5m2"}


class PrecisionOptions(Section):
    """The precisions: the number format of each quantity, bytes per parameter, and what a model takes."""

    billions: tuple[PositiveInt, ...] = (1, 7, 70, 405)
    """Parameters of the models, in units of 10^9."""

    moments: PositiveInt = 2
    """Numbers that the optimizer keeps for each parameter: 2 are Adam's."""


def explain(options: PrecisionOptions, console: Console) -> int:
    """Print the tables."""
    console.print(_formats(), "")
    console.print(_precisions(), "")
    console.print(_memory(
        f"bytes per parameter with {options.moments} moments, and GB of whole models", options,
        {name: per_parameter(formats, options.moments) for name, formats in FORMATS.items()},
    ), "")
    if options.moments == PrecisionOptions().moments:
        console.print(_memory("as others count, with Adam", options, RECIPES))
    return 0


def _formats() -> Table:
    table = _table("number formats", "", "bytes", "digits", "smallest", "smallest normal", "largest")
    for kind, name in SHORT.items():
        table.add_row(
            name, str(kind.itemsize), str(kind.digits + 1), f"2^{kind.tiniest}", f"2^{kind.smallest}",
            f"{kind.largest:.5g}",
        )
    return table


def _precisions() -> Table:
    table = _table("train.precision", "", "kept", "computes", "sums", "moments")
    table.add_column("", overflow="fold")
    for name, formats in FORMATS.items():
        held: tuple[Format, ...] = (formats.storage, formats.compute, formats.reduce, formats.state)
        table.add_row(name, *(SHORT[kind] for kind in held), formats.what)
    return table


def _memory(title: str, options: PrecisionOptions, rows: dict[str, PerParameter]) -> Table:
    models = [f"{n}B" for n in options.billions]
    table = _table(title, "", "weights", "grads", "sums", "master", "moments", "bytes", *models)
    for name, row in rows.items():
        each = (row.weights, row.gradients, row.accumulated, row.master, row.moments)
        table.add_row(
            name, *(str(size or "") for size in each), str(row.total), *(f"{n * row.total:,}" for n in options.billions)
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    """Plain lines, narrow enough for 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, min_width=13)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
