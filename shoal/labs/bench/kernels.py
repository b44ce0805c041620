"""Attention kernels, compared for ``train.attention = "auto"``; and matrix products, the peak that MFU refers to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median

import torch
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty
from shoal.base.units import show_bytes
from shoal.engine.device import host_memory, pick_device, tune_process
from shoal.engine.models.attention import AttentionCore, Kernel
from shoal.engine.models.products import by_mkl, tune_products
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, make_table
from shoal.labs.bench.race import Step, time_in_turns
from shoal.labs.bench.step.workload import DTYPES, BenchPrecision, MatmulWorkload

KERNELS: tuple[Kernel, ...] = ("sdpa", "explicit")
HEADS, HEAD_DIM = 8, 32


class AttentionBenchmark(Benchmark):
    """Causal attention forward and backward, torch's fused kernel against the explicit one."""

    lengths: NonEmpty[PositiveInt] = (128, 256, 512, 1024, 2048)
    """Sequence lengths."""

    tokens: PositiveInt = 2048
    """Total tokens, in sequences of each length."""

    repeats: PositiveInt = 7
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self, console: Console, notify: Notify) -> bool:
        device = pick_device(self.device)
        if device.type == "cpu":
            tune_process()
        title = f"causal attention, forward and backward, {self.tokens} tokens, on {device}"
        console.print(make_table(title, [
            self.measure(length, precision, device) for precision in DTYPES for length in self.lengths
        ]))  # fmt: skip
        return True

    def measure(self, length: int, precision: BenchPrecision, device: torch.device) -> Row:
        """Time both kernels in turns, on all tokens in sequences of one length (at least one sequence). The difference
        is the largest of the outputs, relative to the largest output."""
        shape = (max(1, self.tokens // length), HEADS, length, HEAD_DIM)
        generator = torch.Generator().manual_seed(0)
        q, k, v, gradient = (torch.randn(shape, generator=generator).to(device, DTYPES[precision]) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        cores: dict[str, AttentionCore] = {kernel: AttentionCore(kernel) for kernel in KERNELS}
        outputs: dict[str, torch.Tensor] = {}

        def attend(kernel: str) -> None:
            out = cores[kernel](*inputs, None)
            torch.autograd.grad(out, inputs, gradient)
            outputs[kernel] = out.detach()

        seconds = time_in_turns({kernel: partial(attend, kernel) for kernel in KERNELS}, self.repeats, device=device)
        fused, explicit = (outputs[kernel].float() for kernel in KERNELS)
        fused_ms, explicit_ms = (1e3 * median(seconds[kernel]) for kernel in KERNELS)
        return {
            "dtype": precision, "sequence": length, "sdpa ms": fused_ms, "explicit ms": explicit_ms,
            "sdpa / explicit": fused_ms / explicit_ms,
            "difference": float((fused - explicit).abs().max() / fused.abs().max()),
            "faster": "sdpa" if fused_ms < explicit_ms else "explicit",
        }


def multiply(workload: MatmulWorkload, rank: int, ranks: int) -> Step:
    """Build a step that makes one product into allocated memory."""
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

    def run(self, console: Console, notify: Notify) -> bool:
        side, available = max(self.sides), host_memory()
        if (needed := 3 * 4 * side**2) > available:  # three matrices in fp32
            raise UsageError(
                f"bench peak --sides {side}: its matrices need {show_bytes(needed)}, but this machine has "
                f"{show_bytes(available)}.\n  Use sides up to {int((available / 12) ** 0.5)}."
            )
        ways: list[tuple[BenchPrecision, str, Callable[[], AbstractContextManager[object]]]] = [
            ("fp32", "torch's default", by_mkl), ("bf16", "torch's default", nullcontext)
        ]
        if tune_products():
            ways.insert(1, ("fp32", "oneDNN, as in training", nullcontext))
        rows = []
        for precision, library, context in ways:
            for side in self.sides:
                workload = MatmulWorkload(side, precision)
                step = partial(multiply(workload, 0, 1), 0)
                with context():
                    (seconds,) = time_in_turns({library: step}, 7).values()
                rate = workload.flops / median(seconds)
                rows.append({"dtype": precision, "library": library, "side": side, "GFLOP/s": rate / 1e9})
        console.print(make_table(f"matrix products, {torch.get_num_threads()} threads", rows))
        return True
