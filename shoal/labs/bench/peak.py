"""The matrix-product peak of this machine: the FLOP/s that MFU is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import get_args

import torch
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes
from shoal.engine.device import host_memory
from shoal.engine.models.products import by_mkl, tune_products
from shoal.labs.bench.crew import Step
from shoal.labs.bench.step.workload import BenchPrecision

SIDE = 2048
DTYPES: dict[BenchPrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MatmulWorkload:
    """A workload of one square matrix product, in the units of `Workload`."""

    side: int = SIDE
    precision: BenchPrecision = "fp32"

    @property
    def flops(self) -> int:
        return 2 * self.side**3

    @property
    def tokens(self) -> int:
        """Rows."""
        return self.side


def memory(side: int) -> int:
    """Bytes of the three matrices of a product in fp32; in bf16 those that they are cast from take no more."""
    return 3 * 4 * side**2


def product(workload: MatmulWorkload, rank: int, ranks: int) -> Step:
    """A contender whose step is one product into memory that is already there."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(workload.side, workload.side, generator=generator).to(DTYPES[workload.precision]) for _ in range(2)
    )
    out = torch.empty_like(a)

    def step(number: int) -> float:
        torch.mm(a, b, out=out)
        return 0.0

    return step


def measure(side: int, precision: BenchPrecision, repeats: int = 7) -> float:
    """FLOP/s of a square product in this process: the median of some runs, after one that is not counted."""
    workload = MatmulWorkload(side, precision)
    step = product(workload, 0, 1)
    step(0)
    seconds = []
    for number in range(repeats):
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    return workload.flops / median(seconds)


@dataclass(frozen=True)
class PeakTiming:
    """Square products of one size.

    Attributes:
        library: what multiplies, in words.
        rate: FLOP/s.
    """

    precision: BenchPrecision
    library: str
    side: int
    rate: float


def measure_sides(sides: Sequence[int]) -> list[PeakTiming]:
    """Time products of each side in each dtype, by torch's own library and by that of training.

    Raises:
        UsageError: this machine has no room for a side.
    """
    has = host_memory()
    if (needs := memory(max(sides))) > has:
        raise UsageError(
            f"bench peak --sides {max(sides)}: its matrices take {show_bytes(needs)}, and this machine has "
            f"{show_bytes(has)}.\n  Give sides up to {int((has / memory(1)) ** 0.5)}."
        )
    torchs: dict[str, Callable[[], AbstractContextManager[object]]] = {"as torch has it": by_mkl}
    libraries = torchs | ({"oneDNN, as in training": nullcontext} if tune_products() else {})
    found = []
    for precision in get_args(BenchPrecision):
        for library, inside in (libraries if precision == "fp32" else {"as torch has it": nullcontext}).items():
            for side in sides:
                with inside():
                    found.append(PeakTiming(precision, library, side, measure(side, precision)))
    return found


def table(timings: Sequence[PeakTiming]) -> Table:
    """A row for each dtype, library and side."""
    view = Table(title=f"matrix products, {torch.get_num_threads()} threads")
    for column in ("dtype", "by", "side", "GFLOP / s"):
        view.add_column(column, justify="right")
    for timing in timings:
        view.add_row(timing.precision, timing.library, str(timing.side), f"{timing.rate / 1e9:.1f}")
    return view
