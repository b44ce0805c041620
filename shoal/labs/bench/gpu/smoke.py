"""Calls that may not work on a device, each checked against float64; and a tiny `shoal train`, killed and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shoal
from shoal.engine.device import allow_reproducible_products, reproducible
from shoal.engine.kernels.example import relative_error
from shoal.engine.kernels.swiglu import swiglu, swiglu_reference
from shoal.engine.models.attention import explicit_attention
from shoal.engine.models.block_attention import attend, attend_backward
from shoal.engine.models.loss import CrossEntropy
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.item import GpuSetting
from shoal.spec.config.run import build_config
from shoal.training.records.metrics import read_metrics

BF16 = 2e-2
"""Largest relative error that rounding to bf16 explains."""


def check_call(setting: GpuSetting, name: str) -> Iterator[Row]:
    """Make one of `CALLS`; an error loses the item. The largest relative error is shown."""
    call, needs_gpu = CALLS[name]
    if needs_gpu and setting.rehearsal:
        yield {"result": "needs a GPU"}
        return
    torch.manual_seed(0)
    error, allowed = call(setting)
    yield {"relative error": error, "allowed": allowed, "passed": error <= allowed}


def _triton(setting: GpuSetting) -> tuple[float, float]:
    """One of the smallest Triton kernels: the first one also builds Triton's launcher, with the C compiler."""
    x = torch.randn(3, 128, device=setting.torch_device)
    return relative_error(swiglu(x), swiglu_reference(x.double())), 1e-5


def _loss_in_place(setting: GpuSetting) -> tuple[float, float]:
    """Softmax with ``out=`` its own input, over a vocabulary of 128k."""
    logits = torch.randn(1, setting.pick(2048, 8), setting.pick(128_256, 300), device=setting.torch_device)
    targets = torch.randint(logits.shape[-1], logits.shape[:2], device=logits.device)
    copies = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    CrossEntropy()(copies[0] * 1, targets).backward()
    F.cross_entropy(copies[1].flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert copies[0].grad is not None and copies[1].grad is not None
    return relative_error(copies[0].grad, copies[1].grad), 1e-5


def _scales_of_one_number(setting: GpuSetting) -> tuple[float, float]:
    """Scales without dimensions in `torch._scaled_mm`."""
    a, b = (torch.randn(256, 256, device=setting.torch_device) for _ in range(2))
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    scale = torch.full((), 2.0, device=setting.torch_device)
    found = torch._scaled_mm(codes[0], codes[1].t(), scale, scale, out_dtype=torch.bfloat16)
    return relative_error(found, 4 * codes[0].double() @ codes[1].double().t()), BF16


def _attention_pieces(setting: GpuSetting) -> tuple[float, float]:
    """Attention with its log-sum-exp, and its backward called directly, as context parallelism does."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    q, d_out = (torch.randn(1, 4, 256, 64, device=setting.torch_device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, 256, 64, device=setting.torch_device, dtype=dtype) for _ in range(2))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = explicit_attention(exact[0], exact[1], exact[2], None)
    gradients = torch.autograd.grad(expected, exact, d_out.double())
    out, total = attend(q, k, v, causal=True)
    found = attend_backward(d_out, q, k, v, out, total, causal=True)
    return max(relative_error(x, y) for x, y in zip((out, *found), (expected, *gradients), strict=True)), BF16


def _deterministic_attention(setting: GpuSetting) -> tuple[float, float]:
    """Backward of fused attention with deterministic algorithms, twice bit for bit."""
    allow_reproducible_products()
    shape, dtype = (2, 8, 1024, 64), setting.pick(torch.bfloat16, torch.float32)
    q = torch.randn(shape, device=setting.torch_device, dtype=dtype).requires_grad_()
    with reproducible(setting.torch_device):
        one, two = (
            torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum(), q)[0]
            for _ in range(2)
        )
    return relative_error(one, two), 0.0


def _sums_into_float32(setting: GpuSetting) -> tuple[float, float]:
    """A bf16 product added to a float32 matrix in one call."""
    a, b = (torch.randn(256, 256, device=setting.torch_device, dtype=torch.bfloat16) for _ in range(2))
    total = torch.randn(256, 256, device=setting.torch_device)
    expected = total.double() + a.double() @ b.double()
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    return relative_error(total, expected), 1e-5


def _grouped_products(setting: GpuSetting) -> tuple[float, float]:
    """Grouped products with an empty group, by rows and (for weight gradients) by columns."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    ends = torch.tensor([64, 64, 128], dtype=torch.int32, device=setting.torch_device)
    x, d_y = (torch.randn(128, 64, device=setting.torch_device, dtype=dtype) for _ in range(2))
    w = torch.randn(3, 64, 64, device=setting.torch_device, dtype=dtype)
    found = F.grouped_mm(x, w, offs=ends), F.grouped_mm(d_y.mT, x, offs=ends)[::2]
    parts = (slice(0, 64), slice(64, 128))
    rows = torch.cat([x[part].double() @ w[e].double() for e, part in zip((0, 2), parts, strict=True)])
    columns = torch.stack([d_y[part].double().t() @ x[part].double() for part in parts])
    return max(relative_error(found[0], rows), relative_error(found[1], columns)), BF16


def _graph(setting: GpuSetting) -> tuple[float, float]:
    """Capture of products in a CUDA graph, and its replay."""
    a = torch.randn(256, 256, device=setting.torch_device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(a, a, out=out)
    a.fill_(1.0)
    graph.replay()
    return relative_error(out, torch.full_like(out, 256.0)), 1e-6


def _compiled(setting: GpuSetting) -> tuple[float, float]:
    """A function compiled by Inductor, forward and backward."""
    x = torch.randn(256, 256, device=setting.torch_device).requires_grad_()
    exact = x.detach().double().requires_grad_()

    def compute(x: Tensor) -> Tensor:
        return (F.silu(x) * x.softmax(-1)).sum()

    compute(exact).backward()
    torch.compile(compute, dynamic=False)(x).backward()
    assert x.grad is not None and exact.grad is not None
    return relative_error(x.grad, exact.grad), 1e-4


def _side_stream_copy(setting: GpuSetting) -> tuple[float, float]:
    """Copy to page-locked memory on a side stream, waited for by an event."""
    x = torch.randn(2**20, device=setting.torch_device)
    target = torch.empty(2**20, pin_memory=True)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(x, non_blocking=True)
        event.record()
    x.record_stream(stream)
    event.synchronize()
    return relative_error(target, x.cpu()), 0.0


CALLS: dict[str, tuple[Callable[[GpuSetting], tuple[float, float]], bool]] = {
    "Triton kernel": (_triton, False),
    "softmax over its own input, vocabulary 128k": (_loss_in_place, False),
    "_scaled_mm, scales without dimensions": (_scales_of_one_number, True),
    "attention pieces and their backward": (_attention_pieces, False),
    "deterministic attention backward": (_deterministic_attention, False),
    "addmm of bf16 into float32": (_sums_into_float32, True),
    "grouped_mm with an empty group": (_grouped_products, False),
    "CUDA graph": (_graph, True),
    "torch.compile": (_compiled, True),
    "copy on a side stream": (_side_stream_copy, True),
}
"""Calls by name, and whether they need a GPU; each returns its relative error and the allowed one."""


def train_tiny(setting: GpuSetting) -> Iterator[Row]:
    """Train 20 steps with a SIGKILL in the middle, resume for more, and compare the loss with an undisturbed run."""
    steps, every = setting.pick((20, 5), (4, 2))
    losses = []
    with TemporaryDirectory(prefix="shoal-gpu-") as parent:
        for name, kill in setting.pick((("undisturbed", ""), ("SIGKILL", f"0@{every + 2}")), (("SIGKILL", "0@3"),)):
            folder = Path(parent, name)
            values: dict[str, dict[str, Any]] = {
                "model": {"name": "tiny", "layers": 1, "hidden": 64, "heads": 2},
                "data": {"source": "synthetic", "sequence_length": 64},
                "train": {"steps": steps, "global_batch": 2, "device": setting.device, "validate_every": 0},
                "checkpoint": {"every": every}, "testing": {"kill": kill},
                "metrics": {"tensorboard": False, "sample_prompt": ""},
            }  # fmt: skip
            for way, more in setting.pick(((name, 0), ("resumed after it", every)), ((name, 0),)):
                values["train"] |= {"steps": steps + more}
                begin = time.monotonic()
                if more:
                    values["testing"] = {}
                config = build_config(values)
                code = shoal.train(config, resume=folder) if more else shoal.train(config, run_folder=folder)
                lines = read_metrics(folder)
                yield {
                    "run": way, "steps": lines[-1].step, "loss": lines[-1].loss,
                    "seconds": time.monotonic() - begin, "passed": code == 0 and lines[-1].step == steps + more,
                }
                if not more:
                    losses.append(lines[-1].loss or 0.0)
    if len(losses) > 1:
        yield {"run": "difference after the SIGKILL", "loss": losses[1] - losses[0],
               "passed": abs(losses[1] - losses[0]) < 1e-3}  # fmt: skip
