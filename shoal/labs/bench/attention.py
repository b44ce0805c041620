"""Attention kernels side by side: what ``train.attention = "auto"`` rests on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device, synchronize
from shoal.engine.models.attention import AttentionCore
from shoal.labs.bench.peak import DTYPES
from shoal.labs.bench.step.workload import BenchPrecision

KERNELS = ("sdpa", "explicit")


@dataclass(frozen=True)
class AttentionTiming:
    """Forward and backward of causal attention.

    Attributes:
        device: on which it was measured.
        seconds: by kernel, median.
        difference: largest difference of the two outputs, relative to the largest output.
    """

    device: torch.device
    precision: BenchPrecision
    sequence_length: int
    seconds: dict[str, float]
    difference: float

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def gain(self) -> float:
        """Time of sdpa over that of explicit."""
        return self.seconds["sdpa"] / self.seconds["explicit"]


def measure(
    sequence_length: int, precision: BenchPrecision, device: torch.device, *,
    tokens: int, heads: int, head_dim: int, repeats: int,
) -> AttentionTiming:
    """Time both kernels in turn on ``tokens`` tokens, in as many sequences as they make (at least one)."""
    sequences = max(1, tokens // sequence_length)
    shape = (sequences, heads, sequence_length, head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(shape, generator=generator).to(device, DTYPES[precision]) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    cores = {kernel: AttentionCore() for kernel in KERNELS}
    seconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    outputs = {}
    for repeat in range(repeats + 1):
        for kernel, core in cores.items():
            core.kernel = kernel
            synchronize(device)
            start = time.perf_counter()
            out = core(*inputs, None)
            torch.autograd.grad(out, inputs, gradient)
            synchronize(device)
            if repeat > 0:  # the first warms up
                seconds[kernel].append(time.perf_counter() - start)
            outputs[kernel] = out.detach().float()
    difference = (outputs["sdpa"] - outputs["explicit"]).abs().max() / outputs["sdpa"].abs().max()
    medians = {kernel: median(times) for kernel, times in seconds.items()}
    return AttentionTiming(device, precision, sequence_length, medians, float(difference))


def measure_lengths(
    lengths: Sequence[int], device: str, *, tokens: int, heads: int, head_dim: int, repeats: int
) -> list[AttentionTiming]:
    """Time both kernels for each dtype and sequence length.

    Args:
        device: auto, cpu or cuda.

    Raises:
        UsageError: there is no such device.
    """
    chosen = pick_device(device)
    if chosen.type == "cpu":
        tune_process()
    return [
        measure(length, precision, chosen, tokens=tokens, heads=heads, head_dim=head_dim, repeats=repeats)
        for precision in DTYPES for length in lengths
    ]  # fmt: skip


def table(timings: Sequence[AttentionTiming], tokens: int) -> Table:
    """A row for each dtype and length."""
    view = Table(title=f"causal attention, forward and backward, {tokens} tokens, on {timings[0].device}")
    for column in ("dtype", "sequence", "sdpa ms", "explicit ms", "sdpa / explicit", "difference", "faster"):
        view.add_column(column, justify="right")
    for timing in timings:
        times = [f"{timing.seconds[kernel] * 1e3:.2f}" for kernel in KERNELS]
        view.add_row(
            timing.precision, str(timing.sequence_length), *times, f"{timing.gain:.2f}", f"{timing.difference:.0e}",
            timing.fastest,
        )
    return view
