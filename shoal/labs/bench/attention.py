"""Attention kernels side by side: what ``train.attention = "auto"`` rests on."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device
from shoal.engine.models.attention import AttentionCore, Kernel
from shoal.labs.bench.benchmark import Benchmark, Row, Say, make_table
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import DTYPES, BenchPrecision

KERNELS: tuple[Kernel, ...] = ("sdpa", "explicit")


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
        console.print(make_table(title, timings))
        return True

    def measure(self, length: int, precision: BenchPrecision, device: torch.device) -> Row:
        """Time both kernels in turn, on as many sequences of a length as the tokens make (at least one).

        Returns:
            Median times, and the largest difference of the outputs relative to the largest output.
        """
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
        fused_ms, explicit_ms = (1e3 * median(seconds[kernel]) for kernel in KERNELS)
        return {
            "dtype": precision, "sequence": length, "sdpa ms": fused_ms, "explicit ms": explicit_ms,
            "sdpa / explicit": fused_ms / explicit_ms,
            "difference": float((fused - explicit).abs().max() / fused.abs().max()),
            "faster": "sdpa" if fused_ms < explicit_ms else "explicit",
        }
