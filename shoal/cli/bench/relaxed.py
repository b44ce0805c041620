"""`shoal bench relaxed`: the table, the plot and the verdict of the experiment."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.labs.bench.learning.relaxed import (
    MARGINS,
    METHODS,
    OVER_LINKS,
    REFERENCE,
    draw,
    measure,
    summaries,
    table,
    write_csv,
)
from shoal.labs.bench.progress import telling


class RelaxedOptions(Section):
    """Relaxed data parallelism under one straggler: loss against time; exit code 1 if a loss is beyond its margin."""

    only: str = ""
    """Some of the methods, with commas; all-reduce is always among them."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 120
    """Steps of each run."""

    ranks: PositiveInt = 4
    """Replicas, each a rank of one thread."""

    pace: NonNegativeFloat = 0.04
    """Seconds that a step's computing takes at least, by sleeping."""

    straggler: PositiveFloat = 3.0
    """How many times as long it takes the last rank; 1 for none."""

    link_gbs: NonNegativeFloat = 0.0
    """GB/s of a network that seems to lie between the replicas (train.link_gbs); what shares memory is left out. 0 for
    none."""

    margin: NonNegativeFloat = 0.0
    """Nats per token that any method's mean validation loss may be above that of all-reduce; 0 takes each method's own,
    which is of the default steps, ranks and straggler."""

    out: Path | None = None
    """A folder for relaxed.csv and relaxed.svg; with a network, relaxed-link.csv and relaxed-link.svg."""


def run(options: RelaxedOptions, console: Console) -> int:
    """Run the experiment; returns the exit code."""
    there = OVER_LINKS if options.link_gbs else METHODS
    wanted = [name.strip() for name in options.only.split(",") if name.strip()] or list(there)
    for name in wanted:
        if name not in METHODS:
            raise UsageError(f"bench relaxed --only: there is no '{name}'; {did_you_mean(name, METHODS)}")
        if name not in there:
            raise UsageError(
                f"bench relaxed --only {name} --link-gbs {options.link_gbs:g}: its replicas share memory, over which "
                f"no network can lie.\n  Leave one of them out, or take some of {', '.join(OVER_LINKS)}."
            )
    if options.ranks < 2 or options.straggler < 1:
        raise UsageError("bench relaxed: give --ranks of 2 or more, and a --straggler of 1 or more.")
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench relaxed --out {options.out}: there is no such folder.")
    methods = [name for name in METHODS if name in wanted or name == REFERENCE]
    slow = f"{options.ranks - 1}={options.straggler:g}" if options.straggler > 1 else ""
    with telling(console) as tell:
        runs = measure(
            methods, options.seeds, ranks=options.ranks, steps=options.steps, pace=options.pace, straggler=slow,
            link_gbs=options.link_gbs, say=tell,
        )
    rows = summaries(runs)
    margins = {method: options.margin or MARGINS[method] for method in methods}
    setting = f"{options.ranks} replicas"
    if slow:
        setting += f", one {options.straggler:g} x slower"
    if options.link_gbs:
        setting += f", {1000 * options.link_gbs:g} MB/s between them"
    console.print(table(rows, margins, f"{options.steps} steps on {setting}"))
    if options.out:
        name = "relaxed-link" if options.link_gbs else "relaxed"
        write_csv(runs, options.out / f"{name}.csv")
        (options.out / f"{name}.svg").write_text(draw(runs, f"Loss against time: {setting}"))
    far = [row.method for row in rows if not row.difference <= margins[row.method]]  # also one that is not a number
    console.print(f"beyond their margin: {', '.join(far)}" if far else "all within their margins")
    return 1 if far else 0
