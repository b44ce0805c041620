"""Times of sequence slices on this machine, and TeraPipe's best slices by them (`shoal.pipeline.sequence_slices`)."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Literal

import torch
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.section import NonEmpty
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.bench.benchmark import Benchmark, Notify, make_table
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import DTYPES
from shoal.pipeline.sequence_slices import best_slices, fit_times, pipeline_time
from shoal.spec.catalog import model_shape


class SlicesBenchmark(Benchmark):
    """Slices of a sequence, forward and backward through one layer, and the best slices for TeraPipe."""

    model: str = "tiny"
    """Model of the catalog whose layer is timed."""

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

    def run(self, console: Console, notify: Notify) -> bool:
        """Time slices; print the best for each number of stages, and their time relative to unsliced sequences."""
        device = pick_device(self.device)
        if device.type == "cpu":
            tune_process()
        measured = self.measure(device)
        title = f"a slice through one layer of {self.model}, forward and backward, on {device}"
        console.print(make_table(title, [
            {"tokens": tokens, "tokens before": before, "ms": 1e3 * seconds, "us / token": 1e6 * seconds / tokens}
            for tokens, before, seconds in measured
        ]))  # fmt: skip
        times, shortest = fit_times(measured), min(tokens for tokens, _, _ in measured)
        cuts = [*range(0, self.length - shortest + 1, shortest), self.length]  # as short as measured
        for stages in self.stages:
            best = best_slices(cuts, times, stages, self.microbatches)
            unsliced, sliced = (
                pipeline_time(slices, times, stages, self.microbatches) for slices in ((self.length,), best)
            )
            console.print(
                f"pp {stages}, {self.microbatches} micro-batches: sequence_slices = {list(best)}, "
                f"predicted at {sliced / unsliced:.2f} of the time without slices", highlight=False,
            )
        return True

    def measure(self, device: torch.device) -> list[tuple[int, int, float]]:
        """Time slices of a sixteenth up to the full sequence, at several positions.

        Returns:
            For each (tokens of the slice, tokens before it, median seconds of forward and backward).
        """
        dtype, shape = DTYPES[self.precision], model_shape(self.model)
        shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, self.length), "layers": 1, "vocab": 1})
        model = Transformer(shape)
        initialise(model, seed=0)
        model.embed = model.norm = model.head = None
        model.to(device, dtype)
        before: Slice | None = None

        def forward(length: int, part: Slice) -> torch.Tensor:
            hidden = torch.randn(self.micro_batch, length, shape.hidden, dtype=dtype, device=device)  # [b, s, h]
            tokens = torch.zeros(self.micro_batch, length, dtype=torch.int64, device=device)
            return model(tokens, hidden=hidden.requires_grad_(), part=part)

        def prepare(place: tuple[int, int]) -> None:
            nonlocal before
            before = Slice() if place[1] else None
            if before:
                forward(place[1], before)

        def step(size: int) -> None:
            forward(size, Slice(before)).sum().backward()

        sizes = sorted({max(1, self.length // part) for part in (16, 8, 4, 2, 1)})
        places = [
            (size, start) for size in sizes
            for start in sorted({0, self.length // 4, self.length // 2, self.length - size})
            if size + start <= self.length
        ]  # fmt: skip
        steps = {place: partial(step, place[0]) for place in places}
        seconds = time_in_turns(steps, self.repeats, prepare=prepare, device=device)
        return [(*place, median(times)) for place, times in seconds.items()]
