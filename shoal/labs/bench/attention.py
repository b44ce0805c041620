"""Attention kernels side by side: what ``train.attention = "auto"`` rests on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device
from shoal.engine.models.attention import AttentionCore, Kernel
from shoal.labs.bench.benchmark import Benchmark, Say, make_table
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import DTYPES, BenchPrecision

KERNELS: tuple[Kernel, ...] = ("sdpa", "explicit")


@dataclass(frozen=True)
class AttentionTiming:
    """Forward and backward of causal attention.

    Attributes:
        seconds: by kernel, median.
        difference: largest difference of the two outputs, relative to the largest output.
    """

    precision: BenchPrecision
    sequence_length: int
    seconds: dict[str, float]
    difference: float


class AttentionBenchmark(Benchmark):
    """Causal attention forward and backward, torch's fused kernel against the explicit one."""

    lengths: NonEmpty[PositiveInt] = (128, 256, 512, 1024, 2048)
    """Sequence lengths."""

    tokens: PositiveInt = 2048
    """Tokens in all, in sequences of each length."""

    heads: PositiveInt = 8
    """Query and key heads."""

    head_dim: PositiveInt = 32
    """Width of one head."""

    repeats: PositiveInt = 7
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self, console: Console, say: Say) -> bool:
        """Time the kernels for each dtype and length."""
        device = pick_device(self.device)
        if device.type == "cpu":
            tune_process()
        timings = [self.measure(length, precision, device) for precision in DTYPES for length in self.lengths]
        title = f"causal attention, forward and backward, {self.tokens} tokens, on {device}"
        console.print(make_table(title, timings, {
            "dtype": lambda timing: timing.precision,
            "sequence": lambda timing: timing.sequence_length,
            "sdpa ms": lambda timing: f"{timing.seconds['sdpa'] * 1e3:.2f}",
            "explicit ms": lambda timing: f"{timing.seconds['explicit'] * 1e3:.2f}",
            "sdpa / explicit": lambda timing: f"{timing.seconds['sdpa'] / timing.seconds['explicit']:.2f}",
            "difference": lambda timing: f"{timing.difference:.0e}",
            "faster": lambda timing: min(KERNELS, key=timing.seconds.__getitem__),
        }))
        return True

    def measure(self, length: int, precision: BenchPrecision, device: torch.device) -> AttentionTiming:
        """Time both kernels in turn, on as many sequences of a length as the tokens make (at least one)."""
        shape = (max(1, self.tokens // length), self.heads, length, self.head_dim)
        generator = torch.Generator().manual_seed(0)
        q, k, v, gradient = (torch.randn(shape, generator=generator).to(device, DTYPES[precision]) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        cores: dict[str, AttentionCore] = {kernel: AttentionCore(kernel) for kernel in KERNELS}
        outputs: dict[str, torch.Tensor] = {}

        def attend(kernel: str) -> None:
            out = cores[kernel](*inputs, None)
            torch.autograd.grad(out, inputs, gradient)
            outputs[kernel] = out.detach()

        seconds = time_in_turns(
            {str(kernel): partial(attend, kernel) for kernel in KERNELS}, self.repeats, device=device
        )
        fused, explicit = (outputs[kernel].float() for kernel in KERNELS)
        difference = (fused - explicit).abs().max() / fused.abs().max()
        medians = {kernel: median(times) for kernel, times in seconds.items()}
        return AttentionTiming(precision, length, medians, float(difference))
