"""How long slices of a sequence take here, and into which TeraPipe had best cut it: measured times for the dynamic
program of `shoal.pipeline.sequence_slices`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device, synchronize
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.bench.peak import DTYPES
from shoal.labs.bench.step.workload import BenchPrecision
from shoal.pipeline.sequence_slices import best_slices, fitted, pipeline_time
from shoal.spec.catalog import ModelShape, model_shape


class TimedLayer:
    """One layer of a model, to be timed on slices of ``sequences`` sequences."""

    def __init__(self, shape: ModelShape, sequences: int, precision: BenchPrecision, device: torch.device):
        self.shape, self.sequences, self.dtype, self.device = shape, sequences, DTYPES[precision], device
        self.model = Transformer(shape.model_copy(update={"layers": 1, "vocab": 1}))
        initialise(self.model, seed=0)
        self.model.embed = self.model.norm = self.model.head = None
        self.model.to(device, self.dtype)

    def seconds(self, length: int, before: int, repeats: int) -> float:
        """Median time of forward and backward of a slice that sees ``before`` tokens besides its own."""
        taken = []
        for repeat in range(repeats + 1):
            part = None
            if before:
                part = Slice()
                self._forward(before, part)
            synchronize(self.device)
            start = time.perf_counter()
            self._forward(length, Slice(part)).sum().backward()
            synchronize(self.device)
            if repeat > 0:  # the first warms up
                taken.append(time.perf_counter() - start)
        return median(taken)

    def _forward(self, length: int, part: Slice) -> torch.Tensor:
        hidden = torch.randn(self.sequences, length, self.shape.hidden, dtype=self.dtype, device=self.device)
        tokens = torch.zeros(self.sequences, length, dtype=torch.int64, device=self.device)
        return self.model(tokens, hidden=hidden.requires_grad_(), part=part)


def measure(layer: TimedLayer, tokens: int, repeats: int) -> list[tuple[int, int, float]]:
    """(tokens of the slice, tokens before it, seconds) for slices of a sequence, from a sixteenth to all of it."""
    sizes = sorted({max(1, tokens // part) for part in (16, 8, 4, 2, 1)})
    places = [(size, before) for size in sizes for before in sorted({0, tokens // 4, tokens // 2, tokens - size})]
    return [(size, before, layer.seconds(size, before, repeats)) for size, before in places if size + before <= tokens]


@dataclass(frozen=True)
class SliceTimings:
    """Slices of a sequence through one layer of a model.

    Attributes:
        length: tokens of the whole sequence.
        measured: as `measure` returns it.
    """

    model: str
    device: torch.device
    length: int
    measured: list[tuple[int, int, float]]

    def best(self, stages: int, microbatches: int) -> tuple[tuple[int, ...], float]:
        """Choose slices for a pipeline: their lengths, and their time over that of whole sequences, by the model."""
        times, shortest = fitted(self.measured), min(tokens for tokens, _, _ in self.measured)
        cuts = [*range(0, self.length - shortest + 1, shortest), self.length]  # none shorter than what was measured
        best = best_slices(cuts, times, stages, microbatches)
        whole, cut = (pipeline_time(way, times, stages, microbatches) for way in ((self.length,), best))
        return best, cut / whole


def measure_model(
    model: str, length: int, *, micro_batch: int, precision: BenchPrecision, repeats: int, device: str
) -> SliceTimings:
    """Time slices through one layer of a model of the catalog.

    Args:
        length: tokens of a sequence.
        device: auto, cpu or cuda.

    Raises:
        UsageError: there is no such device or model.
    """
    chosen = pick_device(device)
    if chosen.type == "cpu":
        tune_process()
    shape = model_shape(model)
    shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, length)})
    layer = TimedLayer(shape, micro_batch, precision, chosen)
    return SliceTimings(model, chosen, length, measure(layer, length, repeats))


def table(found: SliceTimings) -> Table:
    """A row for each slice."""
    view = Table(title=f"a slice through one layer of {found.model}, forward and backward, on {found.device}")
    for column in ("tokens", "tokens before", "ms", "us / token"):
        view.add_column(column, justify="right")
    for tokens, before, seconds in found.measured:
        view.add_row(str(tokens), str(before), f"{seconds * 1e3:.2f}", f"{seconds / tokens * 1e6:.1f}")
    return view
