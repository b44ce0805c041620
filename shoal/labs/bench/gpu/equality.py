"""The same steps on the CPU and on the device with every technique; kernels against float64; the memory checker;
layouts of many ranks against one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.engine.collectives.ops import all_gather_single, reduce_scatter_single
from shoal.engine.device import allow_reproducible_products, init_world, reproducible
from shoal.engine.kernels.example import examples_of_kernel, relative_error
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.engine_run import build_engine
from shoal.labs.bench.gpu.item import GpuSetting, attempt
from shoal.launch.prefork import safe_environment
from shoal.spec.config.run import build_config
from shoal.spec.config.sections import OptimizerName
from shoal.spec.number_formats import FORMATS, FP64
from shoal.testing.verify.compare import AMPLIFIED
from shoal.testing.verify.verify import Verification

STEPS = 3
EXACT = {"fp64": 1e-9, "fp32": 1e-5}
"""Largest relative error of losses and gradient norms, and in float64 also of weights. In float32, Adam turns gradients
that are only rounding into full updates, so weights are only shown."""
AMPLIFIED_FP32 = {"muon": 10.0}
"""Larger errors in float32, by optimizer: Muon raises small singular values of updates, which are mostly rounding."""
ROUNDING = 1e-9
"""Weights with a smaller norm after training are not compared. They were initialised with zeros and got no gradient but
rounding, like key biases: softmax ignores what is added to all scores of a query."""
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
    # Key biases have no gradient but rounding, which Adam would turn into full updates (`ROUNDING`).
    "gpt": {"model": {"name": "tiny-gpt", "layers": 2}, "optimizer": {"name": "momentum"}},
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
    engine = build_engine(build_config(values, changes), device, masked=0.3)
    results = [engine.step(step) for step in range(steps)]
    weights = {name: pieces[0].tensor.detach().cpu() for name, pieces in engine.weights().items()}
    return TrainedSteps([r.loss for r in results], [r.gradient_norm for r in results], weights)


def loss_and_norm_errors(ours: TrainedSteps, reference: TrainedSteps) -> tuple[float, float]:
    """Return the largest relative errors of losses and of gradient norms."""
    pairs = (ours.losses, reference.losses), (ours.norms, reference.norms)
    loss, norm = (relative_error(torch.tensor(one), torch.tensor(other)) for one, other in pairs)
    return loss, norm


def weight_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of weights, except of those that are `ROUNDING`.

    >>> weight_error({"w": torch.tensor([2.0]), "k": torch.tensor([3e-17])}, {"w": torch.ones(1), "k": torch.zeros(1)})
    1.0
    """
    return max(
        relative_error(ours[name], weight) for name, weight in reference.items() if weight.norm() >= ROUNDING
    )


def compare_devices(setting: GpuSetting, name: str) -> Iterator[Row]:
    """Compare a technique on the CPU and on the device, in float64 and in float32."""
    changes = VARIANTS[name]
    rule = str(changes.get("optimizer", {}).get("name", ""))
    for precision, allowed in EXACT.items():
        row: dict[str, Any] = {"precision": precision}
        with attempt(row, "failed"):
            ours = train_steps(changes, precision, setting.torch_device)
            reference = train_steps(changes, precision, torch.device("cpu"))
            loss, norm = loss_and_norm_errors(ours, reference)
            weight = weight_error(ours.weights, reference.weights)
            limit = allowed * AMPLIFIED.get(rule, AMPLIFIED_FP32.get(rule, 1.0) if precision == "fp32" else 1.0)
            passed = max(loss, norm, weight if precision == "fp64" else 0.0) <= limit
            row |= {"loss": loss, "gradient norm": norm, "weights": weight, "allowed": limit, "passed": passed}
        yield row


def compare_precisions(setting: GpuSetting) -> Iterator[Row]:
    """Compare every number format on the device with float64 on the CPU."""
    reference = train_steps({}, "fp64", torch.device("cpu"))
    names: dict[str, Changes] = {name: {} for name, of in FORMATS.items() if of.compute != FP64} | {
        f"fp8, {scales}": {"float8": {"scales": scales}} for scales in ("row", "block")
    }
    for name, changes in names.items():
        precision, row = name.partition(",")[0], dict[str, Any](precision=name)
        with attempt(row, "failed"):
            loss, norm = loss_and_norm_errors(train_steps(changes, precision, setting.torch_device), reference)
            allowed = NARROW[FORMATS[precision].products != "compute"]
            row |= {"loss": loss, "gradient norm": norm, "allowed": allowed, "passed": loss <= allowed}
        yield row


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
            row: dict[str, Any] = {"example": example.name, "format": str(dtype).removeprefix("torch.")}
            with attempt(row, "failed"):
                worst, error = max(example.errors(setting.torch_device, dtype).items(), key=lambda each: each[1])
                allowed = example.allowed(dtype)
                row |= {"worst": worst, "relative error": error, "allowed": allowed, "passed": error <= allowed}
            yield row


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


# ---- ranks on one device ---------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3}, "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp 2, zb-v": {"pp": 2, "schedule": "zb-v"}, "cp 2": {"cp": 2}, "ep 2": {"dp": 2, "ep": 2},
    "tp 2, documents": {"tp": 2}, "cp 2, documents": {"cp": 2},
    **{f"dp 2, ZeRO-{zero}": {"dp": 2, "zero": zero} for zero in range(3)}, "tp 2": {"tp": 2},
}  # fmt: skip
PRECISIONS = ("fp64", "bf16", "fp32")
"""Fused operators and attention kernels run in bf16 and fp32 only; in fp64 no rounding hides a difference."""


def verify_layout(setting: GpuSetting, name: str, precision: str) -> Iterator[Row]:
    """Compare one layout in one of `PRECISIONS` with one device, which computes in float64."""
    exact = precision == "fp64"
    # A token goes to 2 of 4 experts in fp64 only: rounding may change which ones, so otherwise it goes to all.
    experts = {"experts": {"count": 4, "ffn": 32, "per_token": 2 if exact else 4}} if "ep" in LAYOUTS[name] else {}
    found = shoal.verify(build_config({
        "model": {"name": "tiny", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 32, **experts},
        "parallel": LAYOUTS[name], "train": {"global_batch": 8, "precision": precision},
        "data": {"source": "synthetic", "sequence_length": 16, "document_mask": "documents" in name},
    }), steps=setting.pick(3, 1), own_precision=not exact, device=setting.device, show=True)  # fmt: skip
    yield _judge(found)


def verify_drawn(setting: GpuSetting, count: int, seed: int) -> Iterator[Row]:
    """Compare randomly drawn layouts of up to 8 ranks with one device."""
    config = build_config({"train": {"seed": seed}})
    yield _judge(shoal.verify(config, random=count, steps=setting.pick(3, 1), device=setting.device, show=True))


def _judge(found: Verification) -> Row:
    text = found.findings[0].text.partition("\n")[0] if found.findings else ""
    return {"layouts": found.layouts, "differ": found.differing,
            "largest error of a gradient": found.worst_gradient, "first": text, "passed": found.same}  # fmt: skip


def check_backend(setting: GpuSetting) -> Iterator[Row]:
    """Call the collectives of a world of one rank: NCCL on a GPU, gloo in a rehearsal."""
    init_world(0, 1, dist.HashStore(), setting.torch_device, 60.0)
    x = torch.arange(8.0, device=setting.torch_device)
    out = torch.empty_like(x)
    for name, call in {
        "all-reduce": lambda: (out.copy_(x), dist.all_reduce(out)),
        "all-gather": lambda: all_gather_single(out, x),
        "reduce-scatter": lambda: reduce_scatter_single(out, x),
        "all-to-all": lambda: dist.all_to_all_single(out, x), "broadcast": lambda: dist.broadcast(out.copy_(x), 0),
    }.items():  # fmt: skip
        out.zero_()
        call()
        yield {"collective": name, "backend": dist.get_backend(), "passed": torch.equal(out, x)}
    dist.destroy_process_group()


if __name__ == "__main__":
    for kind in ("fp32", "bf16"):
        train_steps({}, kind, torch.device("cuda", 0), steps=1)
