"""`shoal explain precision`: what each number format holds, and the memory of a parameter in each precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.section import Section
from shoal.base.units import BYTES, parse
from shoal.report.tables import text_table
from shoal.spec.number_formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, Formats

SHORT = {FP64: "fp64", FP32: "fp32", FP16: "fp16", BF16: "bf16", E4M3: "e4m3", E5M2: "e5m2"}


OTHERS = (
    ("tf32", "4", "11", "2^-136", "2^-126", "3.4012e+38"), ("e2m1", "1/2", "2", "2^-1", "2^0", "6"),
    ("int32", "4", "31", "1", "", "2147483647"), ("int8", "1", "7", "1", "", "127"), ("int4", "1/2", "3", "1", "", "7"),
)  # fmt: skip
"""Formats in which shoal does not train: of tensor cores, the elements of 4-bit floats, and integers."""


class PerParameter(NamedTuple):
    """Bytes per parameter without sharding; ``accumulated`` are separate sums of gradients in a wider format."""

    weights: int
    gradients: int
    master: int
    moments: int
    accumulated: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def per_parameter(formats: Formats) -> PerParameter:
    """Count the bytes in a precision with Adam's two moments; gradients are added directly to their sums."""
    return PerParameter(
        weights=formats.compute.itemsize,
        gradients=formats.reduce.itemsize,
        master=formats.storage.itemsize if formats.master else 0,
        moments=2 * formats.state.itemsize,
    )


RECIPES = {
    # Rajbhandari et al. 2020, section 3.1
    "bf16, fp32 Adam": PerParameter(2, 2, 4, 8),
    # Hugging Face, The Ultra-Scale Playbook; shoal never keeps both
    "bf16, fp32 Adam, gradients in bf16 and fp32": PerParameter(2, 2, 4, 8, accumulated=4),
    "all bf16": PerParameter(2, 2, 0, 4),
    # jax-ml/scaling-book, training
    "bf16 weights, fp32 moments, no gradients": PerParameter(2, 0, 0, 8),
}
"""Accounting of papers and courses, by name: 16, 20, 8 and 10 bytes."""


class PrecisionOptions(Section):
    """Number formats and bytes per parameter.

    Of each quantity in each precision, and what a model takes.
    """

    billions: tuple[PositiveInt, ...] = (1, 7, 70, 405)
    """Parameters of the models, in units of 10^9."""

    memory: str = ""
    """Memory of a device, such as 192GB: adds the largest model that it holds, before activations."""

    per_parameter: PositiveFloat | None = None
    """Bytes per parameter by another account, such as 7: adds a row with them."""


def explain(options: PrecisionOptions, console: Console) -> None:
    """Print the tables.

    Raises:
        UsageError: the memory is no size.
    """
    holds = parse(options.memory, BYTES, where="--memory") if options.memory else None
    console.print(_formats(), "")
    console.print(_precisions(), "")
    console.print(_memory(
        "bytes per parameter with 2 moments, and GB of models", options, holds,
        {name: per_parameter(formats) for name, formats in FORMATS.items()},
    ), "")
    others: dict[str, PerParameter | float] = {**RECIPES}
    if options.per_parameter:
        others["--per-parameter"] = options.per_parameter
    console.print(_memory("as others count, with Adam", options, holds, others))


def _formats() -> Table:
    rows = [
        (name, str(f.itemsize), str(f.digits + 1), f"2^{f.tiniest}", f"2^{f.smallest}", f"{f.largest:.5g}")
        for f, name in SHORT.items()
    ]
    rows += OTHERS
    headings = ("", "bytes", "digits", "smallest", "smallest normal", "largest")
    return text_table(headings, rows, title="number formats")


def _precisions() -> Table:
    rows = [
        (name, *(SHORT[kind] for kind in (f.storage, f.compute, f.reduce, f.state)), f.what)
        for name, f in FORMATS.items()
    ]
    headings = ("", "kept", "computes", "sums", "moments", "")
    return text_table(headings, rows, title="train.precision", words=(0, 5))


def _memory(
    title: str, options: PrecisionOptions, holds: float | None, counted: Mapping[str, PerParameter | float]
) -> Table:
    rows = []
    for name, row in counted.items():
        parts, total = (row, row.total) if isinstance(row, PerParameter) else (PerParameter(0, 0, 0, 0), row)
        sizes = (parts.weights, parts.gradients, parts.accumulated, parts.master, parts.moments)
        models = [f"{n * total:,.12g}" for n in options.billions]
        largest = [f"{holds / total / 1e9:.1f}B"] if holds else []
        rows.append((name, *(str(size or "") for size in sizes), f"{total:g}", *models, *largest))
    models = [f"{n}B" for n in options.billions] + ([f"in {options.memory}"] if holds else [])
    headings = ("", "weights", "grads", "sums", "master", "moments", "bytes", *models)
    return text_table(headings, rows, title=title, gap=1)
