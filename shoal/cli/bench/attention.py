"""`shoal bench attention`: the attention kernels, side by side."""

from __future__ import annotations

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.attention import measure_lengths, table
from shoal.labs.bench.machine import machine


class AttentionOptions(Section):
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


def run(options: AttentionOptions, console: Console) -> int:
    """Time the kernels for each dtype and length; returns the exit code."""
    timings = measure_lengths(
        options.lengths, options.device, tokens=options.tokens, heads=options.heads, head_dim=options.head_dim,
        repeats=options.repeats,
    )
    console.print(table(timings, options.tokens))
    console.print(machine(), highlight=False)
    return 0
