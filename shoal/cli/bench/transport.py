"""`shoal bench transport`: the all-reduce of CPU ranks, by each transport."""

from __future__ import annotations

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.machine import machine
from shoal.labs.bench.transport import measure, table


class TransportOptions(Section):
    """All-reduce between CPU ranks of this host, through and in shared memory against gloo; all in turn."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks, each of 2 or more; one thread a rank."""

    sizes: NonEmpty[PositiveInt] = (4, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    """KiB of float32."""

    repeats: PositiveInt = 15
    """Measurements of each, of 5 all-reduces in a row; the median counts."""


def run(options: TransportOptions, console: Console) -> int:
    """Time all-reduces for each number of ranks and size; returns the exit code."""
    if min(options.ranks) < 2:
        raise UsageError("bench transport --ranks 1: one rank has nobody to exchange with; give 2 or more.")
    sizes = [size * 1024 for size in options.sizes]
    timings = [timing for ranks in options.ranks for timing in measure(ranks, sizes, options.repeats)]
    console.print(table(timings))
    console.print(machine(), highlight=False)
    return 0
