"""The work of all variants: one model, one stream of samples, one optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from shoal.engine.data.batches import Batch
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.config import OptimizerConfig

BenchPrecision = Literal["fp32", "bf16"]
DTYPES: dict[BenchPrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 0  # seed of initial weights and samples

OPTIMIZER = OptimizerConfig(clip_norm=0.0, schedule="constant", warmup_steps=0)
"""AdamW at a constant rate, without clipping; shoal still computes the gradient norm."""


@dataclass(frozen=True)
class Workload:
    """What one training step processes.

    Attributes:
        model: name in the catalog.
        sequence_length: s, tokens in a sequence.
        sequences: sequences in one optimizer step, over all ranks.
        precision: number format; the references only have fp32.
    """

    model: str = "bench-10m"
    sequence_length: int = 256
    sequences: int = 8
    precision: BenchPrecision = "fp32"

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @cached_property
    def samples(self) -> RepeatedSamples:
        return RepeatedSamples(self)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequences * self.sequence_length

    @property
    def flops(self) -> int:
        """Model FLOPs of one step, forward and backward, as `ModelShape.flops_per_token` defines them."""
        return self.tokens * self.shape.flops_per_token(self.sequence_length)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Return one replica's part of a step's samples: those that `Engine` gives it without accumulation."""
        n = self.sequences // parts
        start = step * self.sequences + part * n
        return self.samples.batch(range(start, start + n))


@dataclass(frozen=True)
class MatmulWorkload:
    """One product of square matrices, as a workload.

    Attributes:
        side: rows and columns.
    """

    side: int = 2048
    precision: BenchPrecision = "fp32"

    @property
    def flops(self) -> int:
        return 2 * self.side**3

    @property
    def tokens(self) -> int:
        """Rows."""
        return self.side


class RepeatedSamples:
    """Random tokens: the sequences of four steps, repeated, so that the loss falls as they are learnt."""

    def __init__(self, workload: Workload):
        generator = torch.Generator().manual_seed(SEED)
        shape = (4 * workload.sequences, workload.sequence_length + 1)
        self.vocab_size, self.samples = workload.shape.vocab, shape[0]
        self.fingerprint = f"random {shape}"
        self._tokens = torch.randint(workload.shape.vocab, shape, generator=generator)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self._tokens[torch.tensor(indices) % len(self._tokens)]
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def emulate_device(layers: Iterable[nn.Module], seconds: float) -> None:
    """Make each layer sleep in forward, and twice as long in backward, like a host that waits for its accelerator.

    On CPU ranks the cores that compute also move the messages, so hardly any wait exists that could hide communication.
    """
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * seconds))
