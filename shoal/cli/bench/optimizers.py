"""`shoal bench optimizers`: a step of every update rule beside what torch has for it."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.optimizers import cores_used, measure_rules, table
from shoal.labs.bench.progress import telling


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


def run(options: OptimizersBenchOptions, console: Console) -> int:
    """Time and print; returns the exit code, 1 where neither way of ours reaches the target.

    Raises:
        UsageError: there is no such rule or model, or it has experts.
    """
    with telling(console) as tell:
        timings = measure_rules(
            options.rules, options.parameters, options.model, options.turns, threads=options.threads,
            products=options.products == "equal", say=tell,
        )
    console.print(table(timings))
    if options.products == "torch":
        console.print("The rivals multiply by the library that torch has by itself.")
    console.print(cores_used(options.threads), highlight=False)
    return 0 if all(timing.met for timing in timings) else 1
