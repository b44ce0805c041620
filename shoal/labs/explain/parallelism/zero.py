"""`shoal explain zero`: what each ZeRO stage keeps on a rank and what it sends, in a formula and in bytes.

The stages are defined by Rajbhandari et al. 2020 ("ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.options import reject_unused
from shoal.base.units import show_bytes
from shoal.labs.explain.options import ModelOptions
from shoal.labs.explain.precision import RECIPES, PerParameter, per_parameter
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.traffic import all_reduced, gathered
from shoal.planning.estimable import check_names
from shoal.report.charts import stacked_bars
from shoal.report.tables import text_table
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.layout import Layout, ZeroStage
from shoal.spec.number_formats import FORMATS, Formats

PAPER = RECIPES["bf16, fp32 Adam"]
PAPER_PARTS = (PAPER.weights, 3), (PAPER.gradients, 2), (PAPER.master + PAPER.moments, 1)
"""Bytes per parameter of weights, gradients and optimizer's states, and the stage from which they are sharded."""

STAGES = (0, 1, 2, 3)
SHARDED = ("nothing", "optimizer", "+ gradients", "+ parameters")


class ZeroOptions(ModelOptions):
    """What a rank keeps and sends in each ZeRO stage.

    As a formula, and in bytes of a model.
    """

    parameters: PositiveFloat | None = None
    """Parameters P instead of a model's, such as 7.5e9."""

    dp: PositiveInt = 8
    """Data-parallel ranks N, over which state is sharded."""

    precision: str = "bf16"
    """The precision in which shoal counts."""


class Kept(NamedTuple):
    """Bytes of a rank between steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def keep_by_formula(stage: int, parameters: float, ranks: int) -> Kept:
    """Return a rank's bytes by Rajbhandari et al., figure 1; the master weights are part of the optimizer's states.

    >>> [round(keep_by_formula(stage, 7.5e9, 64).total / 1e9, 1) for stage in STAGES]
    [120.0, 31.4, 16.6, 1.9]
    """
    return Kept(*(parameters * size / (ranks if stage >= since else 1) for size, since in PAPER_PARTS))


def show_formula(stage: int) -> str:
    """Return the formula in bytes, with P parameters and N ranks.

    >>> [show_formula(stage) for stage in STAGES]
    ['16 P', '4 P + 12 P/N', '2 P + 14 P/N', '16 P/N']
    """
    unsharded = sum(size for size, since in PAPER_PARTS if stage < since)
    shard = PAPER.total - unsharded
    return " + ".join(text for text, size in ((f"{unsharded} P", unsharded), (f"{shard} P/N", shard)) if size)


def count_bytes(stage: int, shape: ModelShape, ranks: int, policy: Formats) -> Kept:
    """Return the bytes that shoal keeps on the first rank, padding of its buckets included."""
    layout = Layout(dp=ranks, zero=cast("ZeroStage", stage))
    state = state_bytes(shape, layout, policy, "adamw", [StagePart(range(shape.layers))])
    return Kept(state.parameters, state.gradients, state.optimizer)


def explain(options: ZeroOptions, console: Console) -> Callable[[], str]:
    """Print the table of stages. Returns a function that draws the bytes of a rank."""
    check_names(options.precision, "adamw")
    if options.parameters:
        reject_unused(options, ("model", "precision"), "--parameters is counted by the paper's formula")
    shape, policy = model_shape(options.model), FORMATS[options.precision]
    parameters = options.parameters or float(shape.parameters())
    named = "" if options.parameters else f"{options.model}, "
    what = f"{named}{parameters:,.0f} parameters"
    console.print(f"[bold]{what}[/] on N = {options.dp} data-parallel ranks, bytes of a rank", highlight=False)
    kept = {stage: keep_by_formula(stage, parameters, options.dp) for stage in STAGES}
    counted = {} if options.parameters else {
        stage: count_bytes(stage, shape, options.dp, policy) for stage in STAGES
    }  # fmt: skip
    sizes = per_parameter(policy) if counted else PAPER
    rows = [[str(stage), SHARDED[stage], show_formula(stage), show_bytes(kept[stage].total)] for stage in STAGES]
    sent = [[str(stage), *_sent(stage, parameters, options.dp, sizes.weights, sizes.gradients)] for stage in STAGES]
    headings, sends = ["stage", "sharded", "paper", "bytes"], ["stage", "sends in a step", "", ""]
    if counted:  # too wide for one table
        rows = [row + [show_bytes(n) for n in (*counted[i], counted[i].total)] for i, row in enumerate(rows)]
        headings += ["weights", "gradients", "optimizer", "in shoal"]
        console.print(text_table(headings, rows, words=(0, 1, 2), gap=1))
        console.print(text_table(sends, sent, words=(0, 2, 3), gap=1))
    else:
        rows = [row + how for row, (_, *how) in zip(rows, sent, strict=True)]
        console.print(text_table(headings + sends[1:], rows, words=(0, 1, 2, 5, 6), gap=1))
    console.print(_notes(options, per_parameter(policy)), highlight=False)
    return partial(draw, counted or kept, f"ZeRO of {what} on {options.dp} ranks")


def count_sent(stage: int, parameters: float, ranks: int, weight_bytes: int, gradient_bytes: int) -> float:
    """Return the bytes that a rank sends in a step without accumulation.

    With both in the same format stage 3 sends 1.5 times as much as the others (Rajbhandari et al. 2020, section 7.2).

    >>> round(count_sent(3, 1.0, 64, 2, 2) / count_sent(0, 1.0, 64, 2, 2), 2)
    1.5
    """
    weights, gradients = weight_bytes * parameters, gradient_bytes * parameters
    if stage == 0:
        return all_reduced(gradients, ranks)
    return gathered(gradients, ranks) + (2 if stage == 3 else 1) * gathered(weights, ranks)


def _sent(stage: int, parameters: float, ranks: int, weight_bytes: int, gradient_bytes: int) -> tuple[str, str, str]:
    """Return the bytes sent, the same relative to stage 0, and the collectives."""
    sent, plain = (count_sent(each, parameters, ranks, weight_bytes, gradient_bytes) for each in (stage, 0))
    how = ("all-reduce", "reduce-scatter, all-gather", "reduce-scatter, all-gather", "reduce-scatter, 2 all-gathers")
    return show_bytes(sent), f"x {sent / plain:.2f}" if plain else "", how[stage]


def _notes(options: ZeroOptions, each: PerParameter) -> str:
    paper = "The paper counts 2 bytes of weights, 2 of gradients and 12 of fp32 weights and Adam's moments."
    if options.parameters:
        return f"{paper} It sends both in 16 bits."
    return (f"{paper} Shoal in {options.precision} keeps {each.total} in stage 0, {each.gradients} of them gradients, "
            f"and no copy of the weights in stage 3. It sends gradients of {each.gradients} bytes and weights of "
            f"{each.weights}; the paper's 2 and 2 make stage 3 x 1.50.")  # fmt: skip


def draw(kept: dict[int, Kept], title: str) -> str:
    """Draw a bar for each stage, in its parts."""
    bars = [(f"stage {stage}", list(each), f"{show_bytes(each.total)}") for stage, each in kept.items()]
    return stacked_bars(("parameters", "gradients", "optimizer"), bars, title=title, height=52)
