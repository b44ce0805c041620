"""The matrix-product peak of this machine: the FLOP/s that MFU is measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from shoal.labs.bench.crew import Step

SIDE = 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MatmulWorkload:
    """A workload of one square matrix product, in the units of `Workload`."""

    side: int = SIDE
    precision: str = "fp32"

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


def measure(side: int, precision: str, repeats: int = 7) -> float:
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
