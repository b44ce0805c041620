"""Attention kernels side by side: what ``train.attention = "auto"`` rests on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from shoal.engine.device import synchronize
from shoal.engine.models.attention import AttentionCore
from shoal.labs.bench.peak import DTYPES

KERNELS = ("sdpa", "explicit")


@dataclass(frozen=True)
class AttentionTiming:
    """Forward and backward of causal attention.

    Attributes:
        seconds: by kernel, median.
        difference: largest difference of the two outputs, relative to the largest output.
    """

    precision: str
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
    sequence_length: int, precision: str, device: torch.device, *, tokens: int, heads: int, head_dim: int, repeats: int
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
    return AttentionTiming(precision, sequence_length, {k: median(s) for k, s in seconds.items()}, float(difference))
