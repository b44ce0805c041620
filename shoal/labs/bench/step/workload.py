"""The work of all variants: one model, one stream of samples, one optimizer; and shoal's engine for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from shoal.engine.collectives.group import ThrottledLink
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, SyntheticDataset
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import DataConfig, OptimizerConfig, RunConfig
from shoal.spec.config.model import ModelConfig
from shoal.spec.config.sections import TrainConfig
from shoal.spec.layout import Layout
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.async_dp.engines import CompressedEngine
from shoal.training.step.engine import Engine

Step = Callable[[int], float]
"""Function of the step's number that returns this rank's share of its mean loss [nats]; the ranks' shares add up."""

BenchPrecision = Literal["fp32", "bf16"]
DTYPES: dict[BenchPrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 0  # seed of initial weights and samples

OPTIMIZER = OptimizerConfig(clip_norm=0.0, schedule="constant", warmup_steps=0)
"""AdamW at a constant rate, without clipping; shoal still computes the gradient norm."""


@dataclass(frozen=True)
class Workload:
    """What one training step processes.

    Attributes:
        sequences: sequences in one optimizer step, over all ranks.
        precision: number format; the references only have fp32.
        experts: experts of each layer, each half as wide as the dense block, of which a token takes two; 0 for none.
    """

    model: str = "bench-10m"
    sequence_length: int = 256
    sequences: int = 8
    precision: BenchPrecision = "fp32"
    experts: int = 0

    @cached_property
    def config(self) -> ModelConfig:
        if not self.experts:
            return ModelConfig(name=self.model)
        experts = {"count": self.experts, "per_token": 2, "ffn": model_shape(self.model).ffn // 2}
        return ModelConfig.model_validate({"name": self.model, "experts": experts})

    @cached_property
    def shape(self) -> ModelShape:
        return self.config.shape(vocab=model_shape(self.model).vocab, sequence_length=self.sequence_length)

    @cached_property
    def samples(self) -> RepeatedDataset:
        """The sequences of four steps, repeated."""
        samples = RepeatedDataset(self.shape.vocab, self.sequence_length, SEED, masked=0.0)
        samples.repeats = 4 * self.sequences
        return samples

    @property
    def tokens(self) -> int:
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
    """One product of square matrices, whose rows count as tokens."""

    side: int = 2048
    precision: BenchPrecision = "fp32"

    @property
    def flops(self) -> int:
        return 2 * self.side**3

    @property
    def tokens(self) -> int:
        return self.side


class RepeatedDataset(SyntheticDataset):
    """Random tokens that repeat after some samples, so that the loss falls as they are learnt; 0 for never."""

    repeats = 0

    def batch(self, indices: Sequence[int]) -> Batch:
        return super().batch([i % self.repeats for i in indices] if self.repeats else indices)


def emulate_device(layers: Iterable[nn.Module], seconds: float) -> None:
    """Make each layer sleep in forward, and twice as long in backward, like a host that waits for its accelerator.

    On CPU ranks the cores that compute also move the messages, so hardly any wait exists that could hide communication.
    """
    for layer in layers:
        if seconds:
            layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * seconds))


def shoal_step(workload: Workload, rank: int, ranks: int, **options: Any) -> Step:
    """Build a training step of shoal on any layout, with the options of `build_engine`."""
    return engine_step(build_engine(workload, rank, ranks, **options), rank)


def engine_step(engine: Engine, rank: int) -> Step:
    """Return the step of an engine, whose loss is that of all ranks."""

    def step(number: int) -> float:
        loss = engine.step(number).loss
        return loss if rank == 0 else 0.0

    return step


def build_engine(
    workload: Workload, rank: int, ranks: int, *, compile: bool = False, transport: str = "auto",
    device_seconds: float = 0.0, link_gbs: float = 0.0, **layout: Any,
) -> Engine:
    """Build the engine of a workload.

    Args:
        device_seconds: forward time of each layer on an emulated device (`emulate_device`).
        link_gbs: GB/s of a simulated network, 0 for none.
        layout: fields of `Layout`, with any exact or compressed ``sync``.
    """
    config = RunConfig(
        model=workload.config,
        parallel=make_layout(workload, ranks, **layout),
        train=TrainConfig(
            global_batch=workload.sequences, precision=workload.precision, seed=SEED, compile=compile, device="cpu"
        ),
        data=DataConfig(sequence_length=workload.sequence_length),
        optimizer=OPTIMIZER,
    )
    mesh = Mesh(config.parallel, rank, transport=transport, link=ThrottledLink.from_gbs(link_gbs))
    kind = CompressedEngine if config.parallel.sync in COMPRESSED else Engine
    engine = kind(config, workload.shape, mesh, workload.samples)
    emulate_device((layer for stage in engine.stages for layer in stage.module.layers.values()), device_seconds)
    return engine


def make_layout(workload: Workload, ranks: int, **layout: Any) -> Layout:
    """Return the layout of a workload. Without ``micro_batch``, a replica runs its sequences in one forward.

    Raises:
        UsageError: the layout cannot run this workload on these ranks.
    """
    layout.setdefault("micro_batch", max(1, workload.sequences // layout.get("dp", 1)))
    made = Layout(**layout)
    check_layout(
        made, workload.shape, global_batch=workload.sequences, sequence_length=workload.sequence_length, ranks=ranks
    )
    return made
