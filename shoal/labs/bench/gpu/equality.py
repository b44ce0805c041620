"""The same steps on the CPU and on the device with every technique; kernels against float64; the memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from shoal.engine.device import allow_reproducible_products, reproducible
from shoal.engine.kernels.example import Example, examples_of_kernel, relative_error
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.engine_run import build_engine
from shoal.labs.bench.gpu.item import GpuSetting, attempt
from shoal.launch.prefork import safe_environment
from shoal.spec.config.run import build_config
from shoal.spec.config.sections import OptimizerName
from shoal.spec.number_formats import FORMATS, FP64
from shoal.testing.verify.compare import AMPLIFIED

STEPS = 3
EXACT = {"fp64": 1e-9, "fp32": 1e-5}
"""Largest relative error of losses and gradient norms, and in float64 also of weights. In float32, Adam turns gradients
that are only rounding into full updates, so weights are only shown."""
NARROW = 2e-2, 5e-2
"""Largest relative error of the loss in 16 bits, and in 8 bits."""

Changes = Mapping[str, Mapping[str, Any]]
EXPERTS = {"count": 4, "ffn": 48, "balance_loss": 0.01}
VARIANTS: dict[str, Changes] = {
    **{name: {"optimizer": {"name": name}} for name in get_args(OptimizerName)},
    "recompute selective": {"parallel": {"recompute": "selective"}},
    "recompute full": {"parallel": {"recompute": "full"}},
    "documents": {"data": {"document_mask": True}},
    "documents, explicit attention": {"data": {"document_mask": True}, "train": {"attention": "explicit"}},
    "experts, top-k": {"model": {"experts": {**EXPERTS, "per_token": 2}}},
    "experts, expert-choice": {"model": {"experts": {"count": 4, "ffn": 48, "gate": "expert-choice"}}},
    "experts, dropping": {"model": {"experts": {**EXPERTS, "per_token": 2, "capacity_factor": 1.0}}},
    "mixture of depths": {"model": {"depths": {"capacity": 0.5}}},
    "sequence slices": {"parallel": {"schedule": "terapipe", "sequence_slices": 2}},
    "gpt": {"model": {"name": "tiny-gpt", "layers": 2}},
    "tied": {"model": {"tied": True}},
    "offload, optimizer": {"parallel": {"offload": "optimizer"}},
}


class TrainedSteps(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_steps(changes: Changes, precision: str, device: torch.device, steps: int = STEPS) -> TrainedSteps:
    """Train a tiny model a few steps with masked tokens and two micro-batches."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96},
        "parallel": {"micro_batch": 2}, "data": {"source": "synthetic", "sequence_length": 32},
        "train": {"steps": STEPS, "global_batch": 4, "precision": precision}, "optimizer": {"warmup_steps": 0},
    }  # fmt: skip
    for section, changed in changes.items():
        values[section] = {**values.get(section, {}), **changed}
    engine = build_engine(build_config(values), device, masked=0.3)
    results = [engine.step(step) for step in range(steps)]
    weights = {name: pieces[0].tensor.detach().cpu() for name, pieces in engine.weights().items()}
    return TrainedSteps([r.loss for r in results], [r.gradient_norm for r in results], weights)


def loss_and_norm_errors(ours: TrainedSteps, reference: TrainedSteps) -> tuple[float, float]:
    """Return the largest relative errors of losses and of gradient norms."""
    pairs = (ours.losses, reference.losses), (ours.norms, reference.norms)
    loss, norm = (relative_error(torch.tensor(one), torch.tensor(other)) for one, other in pairs)
    return loss, norm


def compare_devices(setting: GpuSetting, name: str) -> Iterator[Row]:
    """Compare a technique on the CPU and on the device, in float64 and in float32."""
    changes = VARIANTS[name]
    rule = str(changes.get("optimizer", {}).get("name", ""))
    for precision, allowed in EXACT.items():

        def measure(precision: str = precision, allowed: float = allowed) -> Row:
            ours = train_steps(changes, precision, setting.torch_device)
            reference = train_steps(changes, precision, torch.device("cpu"))
            loss, norm = loss_and_norm_errors(ours, reference)
            weight = max(relative_error(ours.weights[key], value) for key, value in reference.weights.items())
            limit = allowed * AMPLIFIED.get(rule, 1.0)
            passed = max(loss, norm, weight if precision == "fp64" else 0.0) <= limit
            return {"loss": loss, "gradient norm": norm, "weights": weight, "allowed": limit, "passed": passed}

        yield attempt({"precision": precision}, measure, "failed")


def compare_precisions(setting: GpuSetting) -> Iterator[Row]:
    """Compare every number format on the device with float64 on the CPU."""
    reference = train_steps({}, "fp64", torch.device("cpu"))
    names: dict[str, Changes] = {name: {} for name, of in FORMATS.items() if of.compute != FP64} | {
        f"fp8, {scales}": {"float8": {"scales": scales}} for scales in ("row", "block")
    }
    for name, changes in names.items():
        precision = name.partition(",")[0]

        def measure(precision: str = precision, changes: Changes = changes) -> Row:
            ours = train_steps(changes, precision, setting.torch_device)
            loss, norm = loss_and_norm_errors(ours, reference)
            allowed = NARROW[FORMATS[precision].products != "compute"]
            return {"loss": loss, "gradient norm": norm, "allowed": allowed, "passed": loss <= allowed}

        yield attempt({"precision": name}, measure, "failed")


def repeat_steps(setting: GpuSetting) -> Iterator[Row]:
    """Run the same steps twice, with and without deterministic algorithms; only the first must agree bit for bit."""
    allow_reproducible_products()
    device = setting.torch_device
    for precision in ("fp32", "bf16"):
        for name, changes in {"dense": {}, "experts": VARIANTS["experts, top-k"]}.items():
            with reproducible(device):
                one, two = (train_steps(changes, precision, device) for _ in range(2))
            same = one.losses == two.losses and all(map(torch.equal, one.weights.values(), two.weights.values()))
            three, four = (train_steps(changes, precision, device).losses for _ in range(2))
            yield {"precision": precision, "model": name, "equal by default": three == four, "passed": same}


def check_kernel(setting: GpuSetting, name: str) -> Iterator[Row]:
    """Compare the operators of a module of `shoal.engine.kernels` with their references in float64."""
    torch.manual_seed(0)
    for example in examples_of_kernel(name):
        for dtype in example.dtypes:

            def measure(example: Example = example, dtype: torch.dtype = dtype) -> Row:
                errors = example.errors(setting.torch_device, dtype)
                worst = max(errors, key=lambda name: errors[name])
                allowed = example.allowed(dtype)
                return {"worst": worst, "relative error": errors[worst], "allowed": allowed,
                        "passed": errors[worst] <= allowed}  # fmt: skip

            row = {"example": example.name, "format": str(dtype).removeprefix("torch.")}
            yield attempt(row, measure, "failed")


def check_memory(setting: GpuSetting) -> Iterator[Row]:
    """Run one tiny step under compute-sanitizer, which finds accesses out of bounds."""
    tool = shutil.which("compute-sanitizer")
    if setting.rehearsal or tool is None:
        yield {"result": "needs a GPU" if setting.rehearsal else "compute-sanitizer is absent"}
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", __name__]
    # Without the cache, neighbours in memory are other tensors.
    environment = safe_environment(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = subprocess.run(["timeout", "150", *command], env=environment, check=False).returncode  # ends children too
    yield {"tool": "memcheck", "exit code": code, "passed": code == 0}


if __name__ == "__main__":
    for kind in ("fp32", "bf16"):
        train_steps({}, kind, torch.device("cuda", 0), steps=1)
