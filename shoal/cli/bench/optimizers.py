"""`shoal bench optimizers`: a step of every update rule beside what torch has for it."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Literal

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import NonEmpty, Section
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import usable_cores
from shoal.engine.optim.build import RULES
from shoal.labs.bench.optimizers import OptimizerTiming, measure, shapes_of
from shoal.labs.bench.progress import telling
from shoal.spec.catalog import model_shape


class OptimizersBenchOptions(Section):
    """A step of the update rules on a flat CPU shard, beside torch's fused and foreach kernels or a plain loop."""

    rules: str = "all"
    """Some of the rules, with commas, or all."""

    parameters: NonEmpty[PositiveInt] = (10_000_000,)
    """Numbers of parameters."""

    model: str | None = None
    """A model without experts, of whose layers as many are taken; default: layers of llama's form, 512 wide, or 1024
    from 50 million parameters on."""

    turns: PositiveInt = 9
    """Steps of each contender, in turn; medians count."""

    threads: PositiveInt = 1
    """CPU threads."""

    products: Literal["equal", "torch"] = "equal"
    """Who multiplies for the others: the library that shoal chooses, or the one that torch has by itself."""


def optimizers(options: OptimizersBenchOptions, console: Console) -> int:
    """Time and print; exit code 1 where neither way of ours reaches the target.

    Raises:
        UsageError: there is no such rule or model, or it has experts.
    """
    names = sorted(RULES) if options.rules == "all" else [name.strip() for name in options.rules.split(",")]
    for name in names:
        if name not in RULES:
            raise UsageError(f"bench optimizers --rules {options.rules}: no rule '{name}'; {did_you_mean(name, RULES)}")
    model = None if options.model is None else model_shape(options.model)
    if model is not None and model.experts:
        raise UsageError(f"bench optimizers --model {options.model}: it has experts; take a model without.")
    tune_process()
    torch.set_num_threads(options.threads)
    timings = []
    with telling(console) as tell:
        for parameters in options.parameters:
            for name in names:
                tell(f"{name}, {parameters:,} parameters")
                shapes = shapes_of(parameters, model)
                timings.append(measure(name, shapes, options.turns, products=options.products == "equal"))
    console.print(table(timings))
    if options.products == "torch":
        console.print("The rivals multiply by the library that torch has by itself.")
    console.print(f"torch {torch.__version__}, {options.threads} of {usable_cores()} cores", highlight=False)
    return 0 if all(timing.met for timing in timings) else 1


def table(timings: list[OptimizerTiming]) -> Table:
    """The result as people read it."""
    view = Table(title="one update: shoal's on the flat shard, torch's by tensor")
    for column in ("rule", "parameters", "shoal", "ms", "rival", "rival ms", "ratio", "quartiles", "target", "met"):
        view.add_column(column, justify="left" if column in ("rule", "shoal", "rival", "met") else "right")
    for timing in timings:
        theirs = timing.rivals[timing.rival]
        for name, ours in timing.ours.items():
            each = [b / a for a, b in zip(ours, theirs, strict=True)]
            low, _, high = quantiles(each, n=4) if len(each) > 1 else each * 3
            ratio = timing.ratio(name)
            view.add_row(
                timing.rule, f"{timing.parameters / 1e6:.1f} M", "compiled" if name == "compiled" else "as it is",
                f"{median(ours) * 1e3:.1f}", timing.rival, f"{median(theirs) * 1e3:.1f}", f"{ratio:.2f}",
                f"{low:.2f} to {high:.2f}", f"{timing.target:.0f}",
                "[green]yes" if ratio >= timing.target else "[red]no",
            )
    return view
