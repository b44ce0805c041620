"""`shoal bench slices`: slices of a sequence, and the best ones for a pipeline."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.machine import machine
from shoal.labs.bench.slices import measure_model, table


class SlicesOptions(Section):
    """Slices of a sequence, forward and backward through one layer, and the slices that TeraPipe had best take."""

    model: str = "tiny"
    """A model of the catalog, whose layer is timed."""

    length: PositiveInt = 1024
    """Tokens of a sequence."""

    stages: NonEmpty[PositiveInt] = (2, 4, 8)
    """Pipeline stages to choose for."""

    micro_batch: PositiveInt = 1
    """Sequences in one forward pass."""

    microbatches: PositiveInt = 1
    """Micro-batches in a step."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16."""

    repeats: PositiveInt = 5
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""


def run(options: SlicesOptions, console: Console) -> int:
    """Time slices, and print the best for each number of stages; returns the exit code."""
    found = measure_model(
        options.model, options.length, micro_batch=options.micro_batch, precision=options.precision,
        repeats=options.repeats, device=options.device,
    )
    console.print(table(found))
    for stages in options.stages:
        best, share = found.best(stages, options.microbatches)
        console.print(
            f"pp {stages}, {options.microbatches} micro-batches: sequence_slices = {list(best)}, "
            f"{share:.2f} of the time of whole sequences by this model", highlight=False,
        )
    console.print(machine(), highlight=False)
    return 0
