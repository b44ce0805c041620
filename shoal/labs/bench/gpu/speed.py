"""Speed of training steps: bf16 by shape, 8-bit recipes, mixture of experts, optimizers, offload, and checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from shoal.engine.checkpoint import Checkpointer
from shoal.engine.device import host_memory
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.ceilings import MODEL, time_call
from shoal.labs.bench.gpu.engine_run import RunPoint, build_engine, measure_point, time_each
from shoal.labs.bench.gpu.item import GpuSetting, attempt
from shoal.spec.catalog import model_shape
from shoal.spec.config import Float8Config
from shoal.spec.config.sections import OptimizerName
from shoal.spec.number_formats import FORMATS, FP64
from shoal.training.check import check

VOCAB = 128_256
STEP_TOKENS = 32_768
TINY = {"name": "tiny", "layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 96, "vocab": 257}
BYTES_SAVED = 12
"""Bytes of a checkpoint per parameter: float32 weights and two moments."""


def layer_point(setting: GpuSetting, layers: int, s: int, b: int, *, compile: bool = False, **changes: Any) -> RunPoint:
    """Return a run with layers of Llama-3-8B's shape, of `STEP_TOKENS` a step; in a rehearsal, with tiny ones."""
    if setting.rehearsal:
        return RunPoint(TINY, 32, b, False, 2, changes)
    model = {"name": MODEL, "layers": layers, "vocab": VOCAB}
    return RunPoint(model, s, b, compile, max(2, STEP_TOKENS // (s * b)), changes)


def model_point(setting: GpuSetting, name: str, s: int, b: int, *, compile: bool = False, **changes: Any) -> RunPoint:
    """Return a run of a model of the catalog, with its own vocabulary."""
    if setting.rehearsal:
        return layer_point(setting, 1, s, 2, **changes)
    return RunPoint({"name": name, "vocab": model_shape(name).vocab}, s, b, compile, 4, changes)


def time_point(setting: GpuSetting, point: RunPoint, trace: bool = False) -> Iterator[Row]:
    """Time one run; a run that needs too much memory is a result too."""
    row: dict[str, Any] = {}
    with attempt(row):
        row |= measure_point(setting, point, trace)
    yield row


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def list_recipes() -> dict[str, dict[str, dict[str, Any]]]:
    """Return bf16 and every recipe of 8-bit (or narrower) products, as changes of a config."""
    found: dict[str, dict[str, dict[str, Any]]] = {"bf16": {}}
    for name, formats in FORMATS.items():
        if formats.products == "compute" or formats.compute == FP64:
            continue
        if formats.products != "float8":
            found[name] = {"train": {"precision": name}}
            continue
        for scales in get_args(Float8Config.model_fields["scales"].annotation):
            found[f"{name}, {scales}"] = {"train": {"precision": name}, "float8": {"scales": scales}}
        found[f"{name}, delayed"] = {"train": {"precision": name}, "float8": {"amax": "delayed"}}
    return found


def measure_loss_gap(setting: GpuSetting, recipes: list[str]) -> Iterator[Row]:
    """Train a small model with each recipe, on four batches that it learns by heart; the first is the reference.

    It runs with two more seeds too: a gap means nothing unless it is larger than theirs. The rate is low and warms up,
    without which seeds differed by more than formats.
    """
    steps = setting.pick(100, 2)
    model = {"name": "tiny", "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 8192}
    point = RunPoint(setting.pick(model, TINY), setting.pick(512, 32), setting.pick(8, 2), microbatches=1)
    calm = {"schedule": "constant", "learning_rate": 3e-4, "warmup_steps": setting.pick(10, 1)}
    reference: list[float] = []
    for name, seed in [*((name, 0) for name in recipes), (recipes[0], 1), (recipes[0], 2)]:
        row: dict[str, Any] = {"recipe": name, "seed": seed, "steps": steps}
        with attempt(row):
            changes = list_recipes()[name]
            train = {**changes.get("train", {}), "seed": seed}
            config = point.changed(**{**changes, "train": train, "optimizer": calm}).config
            engine = build_engine(config, setting.torch_device, repeats=4)
            losses = [engine.step(step).loss for step in range(steps)]
            if not reference:
                reference.append(mean(losses))
            row |= {
                "first loss": losses[0], "last losses": mean(losses[-5:]), "mean loss": mean(losses),
                "gap of the mean": mean(losses) - reference[0],
            }
        yield row


# ---- optimizers ------------------------------------------------------------------------------------------------------


def measure_optimizer(setting: GpuSetting, name: OptimizerName, precision: str) -> Iterator[Row]:
    """Time updates of a model with a billion parameters, without forward and backward."""
    device = setting.torch_device
    row: dict[str, Any] = {}
    with attempt(row):
        # Sophia's first step learns its estimate of the Hessian; the next one would be due within the timed updates.
        rule = {"name": name} | ({"hessian_every": 1_000_000} if name.startswith("sophia") else {})
        point = model_point(setting, "llama-3.2-1b", 128, 1).changed(
            train={"precision": precision, "global_batch": setting.pick(1, 2)}, optimizer=rule
        )
        engine = build_engine(point.config, device)
        engine.step(0)
        count = engine.shape.parameters()
        seconds = time_call(partial(engine.optimizer.step, 1e-6), device)
        allocated = None if setting.rehearsal else torch.cuda.memory_allocated() / count
        row |= {
            "ms": 1e3 * seconds, "states B/param": engine.optimizer.bytes() / count, "allocated B/param": allocated,
            "parameters": count,
        }
    yield row


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def measure_checkpoint(setting: GpuSetting) -> Iterator[Row]:
    """Save in the background while training: the stall first, since a slow disk may not finish its file in time."""
    free = shutil.disk_usage(setting.out).free
    for layers in (16, 4, 1):  # 54, 23 and 15 GB
        point = layer_point(setting, layers, 4096, 1)
        size = BYTES_SAVED * check(point.config).parameters()
        if 1.1 * size < free and 2.2 * size < host_memory():
            break
    engine = build_engine(point.config, setting.torch_device)
    plain = median(time_each(engine.step, setting))
    with TemporaryDirectory(dir=setting.out, prefix="checkpoint-") as folder:
        saver = Checkpointer(Path(folder), group=None, keep=1, asynchronous=True, report=lambda text: None)
        begin = time.perf_counter()
        saver.prepare(engine.state())  # as the trainer does before the first step
        yield {"save": 0, "GB": size / 1e9, "memory prepared in s": time.perf_counter() - begin}
        for number in (1, 2):
            begin = time.perf_counter()
            stalled = saver.save(number, engine.state(), {"model": {}, "step": number})
            engine.optimizer.reads.append(saver.copied)  # as the trainer does: the next update waits for the copy
            during = time_each(engine.step, setting, warmup=0, steps=5, first=10 * number)
            row: dict[str, Any] = {"save": number, "GB": size / 1e9}
            yield {
                **row, "stalled s": stalled, "step ms": 1e3 * plain, "step while writing ms": 1e3 * median(during),
            }
            saver.wait()
            yield {**row, "written in s": time.perf_counter() - begin}
            for written in Path(folder).glob("step-*"):  # two may not fit on the disk
                shutil.rmtree(written)
        saver.close()
