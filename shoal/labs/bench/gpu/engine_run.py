"""Run the training engine of one rank on synthetic tokens, without trainer, data preparation or checkpoints."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.device import synchronize
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.ceilings import attained_flops
from shoal.labs.bench.gpu.item import GpuSetting
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import RepeatedDataset
from shoal.planning.cost.memory.stage import GB
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.clusters import cluster
from shoal.spec.config import RunConfig
from shoal.spec.config.run import build_config
from shoal.training.check import check
from shoal.training.step.engine import Engine
from shoal.training.step.late_step import StartedStep

REHEARSED = "h200-sxm"
"""Accelerator of the estimates that a rehearsal shows."""


def build_engine(config: RunConfig, device: torch.device, masked: float = 0.0, repeats: int = 0) -> Engine:
    """Build the engine of a run on one rank, on random tokens.

    Args:
        masked: mean fraction of the tokens without a loss.
        repeats: steps after which the samples repeat; 0 for never.
    """
    shape, data = check(config, ranks=1), config.data
    samples = RepeatedDataset(
        shape.vocab, data.sequence_length, config.train.seed, masked, documents=data.document_mask
    )
    samples.repeats = repeats * config.train.global_batch
    return Engine(config, shape, Mesh(config.parallel, 0, device), samples)


@dataclass(frozen=True)
class RunPoint:
    """A training run to time: tokens of a sequence, sequences of a micro-batch, and further config by section."""

    model: Mapping[str, Any]
    sequence: int
    batch: int
    compile: bool = False
    microbatches: int = 4
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def config(self) -> RunConfig:
        """Build the config of a run in bf16, without warm-up of the learning rate."""
        values: dict[str, dict[str, Any]] = {
            "model": dict(self.model), "parallel": {"micro_batch": self.batch},
            "data": {"source": "synthetic", "sequence_length": self.sequence},
            "train": {
                "global_batch": self.batch * self.microbatches, "precision": "bf16", "compile": self.compile,
                "steps": 1000,
            },
            "optimizer": {"schedule": "constant", "warmup_steps": 0},
        }  # fmt: skip
        return build_config(values, self.changes)

    def changed(self, **changes: Mapping[str, Any]) -> RunPoint:
        """Return a copy with further config values by section."""
        return replace(self, changes={**self.changes, **changes})

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch * self.microbatches

    def estimate(self, setting: GpuSetting) -> Estimate:
        """Return the cost model's estimate of this run."""
        config, name = self.config, setting.accelerator.name if setting.accelerator else REHEARSED
        return Estimate(EstimatedRun(
            check(config), config.parallel, cluster(name), self.sequence, config.train.global_batch,
            config.train.precision, config.optimizer.name, document_mask=config.data.document_mask,
            float8=config.float8,
        ))  # fmt: skip


def time_each(
    step: Callable[[int], object], setting: GpuSetting, warmup: int = 2, steps: int = 3, first: int = 0,
    together: int = 1,
) -> list[float]:
    """Return the seconds of steps after a warm-up, in which the compiler runs and kernels are chosen.

    Args:
        together: steps that are timed as one, so that the host may launch the next before the device is done.
    """
    numbers = itertools.count(first)
    warmup, steps, together = setting.pick(warmup, 1), setting.pick(steps, 1), setting.pick(together, 1)
    for _ in range(warmup):
        step(next(numbers))
    return time_in_turns(
        {"": lambda: step(next(numbers))}, steps, warmup=0, in_a_row=together, device=setting.torch_device
    )[""]


def read_late(engine: Engine) -> Callable[[int], object]:
    """Return a step as the trainer takes it: each result is read after the next has started, if the engine allows."""
    unread: list[StartedStep] = []

    def step(number: int) -> None:
        unread.append(engine.start(number))
        if len(unread) > 1:
            unread.pop(0).read()

    return step if engine.starts_early else engine.step


def describe_rates(setting: GpuSetting, point: RunPoint, step: float, attained: float) -> Row:
    """Describe a step of some seconds, given the FLOP/s of the products of one layer.

    MFU counts attention in full, as the rest of shoal does, and in its causal half. "% of products" is the second over
    the rate of the products.
    """
    shape = check(point.config)
    full = point.tokens * shape.flops_per_token(point.sequence)
    causal = full - point.tokens * 6 * shape.layers * shape.heads * shape.head_dim * point.sequence
    return {
        "step ms": 1e3 * step, "TFLOP/s": full / step / 1e12,
        "MFU %": setting.share_of_peak(full / step, "bf16"), "causal %": setting.share_of_peak(causal / step, "bf16"),
        "% of products": 100 * causal / step / attained,
    }


def measure_point(setting: GpuSetting, point: RunPoint, trace: bool = False) -> Row:
    """Time steps of a run; return its MFU, its kernels, its peak memory, and the estimates of both.

    Offloaded runs have no estimates. Only torch's allocator counts as reserved, measured and estimated.
    """
    device, shape = setting.torch_device, check(point.config)
    attained = attained_flops(shape, point.batch * point.sequence, device)
    if not setting.rehearsal:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = build_engine(point.config, device)
    seconds = time_each(read_late(engine), setting, together=2)
    step = median(seconds)
    allocated, reserved = (
        (None, None) if setting.rehearsal else (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    )
    kernels = profile_step(engine, setting, setting.out / "trace.json.gz" if trace else None)
    rates = describe_rates(setting, point, step, attained)
    expected = point.estimate(setting) if point.config.parallel.offload == "none" else None
    outside = expected.calibration.numbers["context"] * GB if expected else 0.0
    return {
        **rates,
        "kernels ms": 1e3 * kernels.seconds, "host-bound %": max(0.0, 100 * (1 - kernels.seconds / step)),
        "launches": kernels.launches,
        "estimated ms": expected and 1e3 * expected.step_seconds,
        "allocated GB": allocated and allocated / 1e9,
        "estimated GB": expected and expected.fullest.allocated / 1e9,
        "more": {
            "layers": shape.layers, "s": point.sequence, "b": point.batch, "compiled": point.compile,
            "microbatches": point.microbatches, "tokens/s": point.tokens / step, "seconds": seconds,
            "attained_flops": attained, "longest kernels": kernels.longest,
            "reserved GB": reserved and reserved / 1e9,
            "estimated reserved GB": expected and (expected.fullest.reserved - outside) / 1e9,
            "% of fp8 peak": setting.share_of_peak(1e12 * rates["TFLOP/s"], "fp8") if engine.float8 else None,
        },
    }  # fmt: skip


class StepKernels(NamedTuple):
    """Kernels of one step.

    Attributes:
        seconds: time in which at least one runs.
        longest: [name, ms, launches] of the kernels with the largest total time.
    """

    seconds: float
    launches: int
    longest: list[tuple[str, float, int]]


def profile_step(engine: Engine, setting: GpuSetting, trace: Path | None) -> StepKernels:
    """Return the kernels of a step. In a rehearsal, the operators of the CPU take their place."""
    cuda = not setting.rehearsal
    kinds = [ProfilerActivity.CPU] * (trace is not None or not cuda) + [ProfilerActivity.CUDA] * cuda
    with profile(activities=kinds) as profiler:
        engine.step(999)  # after the ones that were timed
        synchronize(setting.torch_device)
    if trace:
        profiler.export_chrome_trace(str(trace))
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [
        event for event in profiler.events()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    total, count = Counter[str](), Counter(event.name[:120] for event in events)
    for event in events:
        total[event.name[:120]] += event.time_range.elapsed_us()
    longest = [(name, round(1e-3 * us, 3), count[name]) for name, us in total.most_common(16)]
    return StepKernels(1e-6 * covered([(e.time_range.start, e.time_range.end) for e in events]), len(events), longest)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> covered([(1, 3), (5, 6), (0, 2)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
