"""`shoal bench peak`: the matrix-product peak of this machine."""

from __future__ import annotations

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.machine import machine
from shoal.labs.bench.peak import measure_sides, table


class PeakOptions(Section):
    """FLOP/s of square matrix products on the CPU: the peak that shares are measured against."""

    sides: NonEmpty[PositiveInt] = (512, 1024, 2048)
    """Rows and columns."""


def run(options: PeakOptions, console: Console) -> int:
    """Time the products; returns the exit code.

    Raises:
        UsageError: this machine has no room for a side.
    """
    console.print(table(measure_sides(options.sides)))
    console.print(machine(), highlight=False)
    return 0
