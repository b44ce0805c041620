"""The matrix-product peak of this machine: the FLOP/s that MFU is measured against."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty
from shoal.base.units import show_bytes
from shoal.engine.device import host_memory
from shoal.engine.models.products import by_mkl, tune_products
from shoal.labs.bench.benchmark import Benchmark, Say, make_table
from shoal.labs.bench.contender import Step
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import DTYPES, BenchPrecision

SIDE = 2048
REPEATS = 7


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

    @property
    def memory(self) -> int:
        """Bytes of the three matrices in fp32; in bf16 those that they are cast from take no more."""
        return 3 * 4 * self.side**2


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


class PeakBenchmark(Benchmark):
    """FLOP/s of square matrix products on the CPU: the peak that shares are measured against."""

    sides: NonEmpty[PositiveInt] = (512, 1024, 2048)
    """Rows and columns."""

    def run(self, console: Console, say: Say) -> bool:
        """Time products by torch's own library and by that of training."""
        has, needs = host_memory(), MatmulWorkload(max(self.sides)).memory
        if needs > has:
            raise UsageError(
                f"bench peak --sides {max(self.sides)}: its matrices take {show_bytes(needs)}, and this machine has "
                f"{show_bytes(has)}.\n  Give sides up to {int((has / MatmulWorkload(1).memory) ** 0.5)}."
            )
        ways: list[tuple[BenchPrecision, str, Callable[[], AbstractContextManager[object]]]] = [
            ("fp32", "as torch has it", by_mkl), ("bf16", "as torch has it", nullcontext)
        ]
        if tune_products():
            ways.insert(1, ("fp32", "oneDNN, as in training", nullcontext))
        found = []
        for precision, library, context in ways:
            for side in self.sides:
                workload = MatmulWorkload(side, precision)
                step = partial(product(workload, 0, 1), 0)
                with context():
                    (seconds,) = time_in_turns({library: step}, REPEATS).values()
                rate = workload.flops / median(seconds)
                found.append({"dtype": precision, "by": library, "side": side, "GFLOP / s": rate / 1e9})
        console.print(make_table(f"matrix products, {torch.get_num_threads()} threads", found))
        return True
