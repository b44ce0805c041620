"""How long slices of a sequence take here, and into which TeraPipe had best cut it: measured times for the dynamic
program of `shoal.pipeline.sequence_slices`."""

from __future__ import annotations

import time
from statistics import median

import torch

from shoal.engine.device import synchronize
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.bench.peak import DTYPES
from shoal.spec.catalog import ModelShape


class TimedLayer:
    """One layer of a model, to be timed on slices of ``sequences`` sequences."""

    def __init__(self, shape: ModelShape, sequences: int, precision: str, device: torch.device):
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
