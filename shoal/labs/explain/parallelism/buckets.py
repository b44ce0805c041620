"""`shoal explain buckets`: which parameters share a bucket, whose gradients are reduced during backward.

PyTorch's DDP fills buckets of 25 MB in the same way (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.units import show_bytes
from shoal.labs.explain.options import ModelOptions
from shoal.planning.cost.buckets import Bucket, cut_buckets, fill_buckets
from shoal.planning.cost.parameters import StagePart, list_units
from shoal.planning.estimable import check_names
from shoal.report.charts import stacked_bars
from shoal.report.tables import text_table
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.layout import Layout, ZeroStage
from shoal.spec.number_formats import FORMATS

MOST_DRAWN = 40


class BucketsOptions(ModelOptions):
    """Which parameters share a bucket, and its bytes.

    In the order in which a forward uses them; backward reduces them from the last to the first.
    """

    model: str = "llama-3.2-1b"
    """A model of the catalog."""

    dp: PositiveInt = 8
    """Data-parallel ranks."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks, which split the parameters first."""

    zero: ZeroStage = 1
    """ZeRO stage; in stage 3 every layer has a bucket."""

    bucket_mb: PositiveFloat = 25.0
    """Least size of a bucket in MiB, of parallel.bucket_mb."""

    precision: str = "bf16"
    """Precision, which sets the format in which gradients are reduced."""


class Held(NamedTuple):
    """One bucket: its parameters, its bytes with padding, and the bytes of a rank's shard."""

    names: tuple[str, ...]
    bytes: int
    shard: int


def list_buckets(shape: ModelShape, layout: Layout, itemsize: int) -> list[Held]:
    """Return the buckets of the first rank of a model on one stage, in forward order, as `shoal.engine` fills them."""
    part = StagePart(range(shape.layers))
    stage = fill_buckets(shape, layout, part, itemsize, 0, 0, 0)
    chunks, full = cut_buckets(layout, stage)
    units = list_units(shape, layout, part)
    members = {i: list[str]() for i in range(len(stage.buckets))}
    for unit, numbers in zip(units, stage.of_unit, strict=True):
        for held in unit:
            members[_find(held.alone, held.expert, numbers, stage.buckets)].append(held.name)
    return [Held(tuple(members[i]), full[i] * itemsize, chunks[i] * itemsize) for i in range(len(full))]


def _find(alone: bool, expert: bool, numbers: tuple[int, ...], buckets: list[Bucket]) -> int:
    """Return the bucket of a parameter, one of its unit's buckets: no bucket mixes experts and others."""
    return next(i for i in numbers if (buckets[i][0].expert, buckets[i][0].alone) == (expert, alone))


def explain(options: BucketsOptions, console: Console) -> Callable[[], str]:
    """Print the buckets. Returns a function that draws them."""
    check_names(options.precision, "adamw")
    shape, reduce = model_shape(options.model), FORMATS[options.precision].reduce
    layout = Layout(dp=options.dp, tp=options.tp, zero=options.zero, bucket_mb=options.bucket_mb)
    found = list_buckets(shape, layout, reduce.itemsize)
    cap = ", one for each layer" if options.zero == 3 else f" of at least {options.bucket_mb:g} MiB"
    console.print(
        f"[bold]{options.model}[/], {layout.describe()}: {len(found)} buckets{cap}, gradients in {reduce.name}",
        highlight=False,
    )
    rows = [
        (span, show_bytes(held.bytes), show_bytes(held.shard), ", ".join(_shorten(held.names)))
        for span, held in _merge(found)
    ]
    console.print(text_table(("bucket", "bytes", "shard", "parameters"), rows, words=(0, 3)))
    how = "all-reduced" if options.zero == 0 else "reduce-scattered"
    total = show_bytes(sum(held.bytes for held in found))
    console.print(f"Backward fills them from the last to the first; each is {how} while it computes the next. "
                  f"{total} in all, padding included.", highlight=False)  # fmt: skip
    title = f"Buckets of {options.model}, {layout.describe()}"
    return partial(draw, found, 0.0 if options.zero == 3 else layout.bucket_bytes, title)


def _merge(found: list[Held]) -> Iterator[tuple[str, Held]]:
    """Yield the buckets with their numbers; runs that differ in the numbers of layers alone are one row."""
    def kind(item: tuple[int, Held]) -> tuple:
        held = item[1]
        return held.bytes, tuple(".".join(p for p in name.split(".") if not p.isdigit()) for name in held.names)

    for _, group in groupby(enumerate(found), kind):
        same = list(group)
        (first, held), (last, _) = same[0], same[-1]
        if first < last:
            held = held._replace(names=tuple(re.sub(r"layers\.\d+", "layers.*", name) for name in held.names))
        yield (f"{first}" if first == last else f"{first} to {last}"), held


def _shorten(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of parameters; several of one layer are its name and their number."""
    for module, group in groupby(names, lambda name: ".".join(name.split(".")[:2])):
        same = list(group)
        yield f"{module} ({len(same)})" if len(same) > 2 else ", ".join(same)


def draw(found: list[Held], cap: float, title: str) -> str:
    """Draw a bar for each bucket, the one that is reduced first on top, with its cap."""
    shown = [*enumerate(found)][::-1][:MOST_DRAWN]
    more = f" The first {len(shown)} of {len(found)}." if len(shown) < len(found) else ""
    words = f"In the order in which backward completes them.{more}"
    bars = [
        (f"{number}: {', '.join(_shorten(held.names))[:70]}", [float(held.bytes)], show_bytes(held.bytes))
        for number, held in shown
    ]
    limit = (cap, f"{cap / 2**20:g} MiB = {show_bytes(cap)}") if cap else None
    return stacked_bars([""], bars, limit, title=f"{title}\n{words}", height=22)
