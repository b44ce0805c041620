"""Ceilings of a device: copies, matrix products of a layer's shapes in each number format, and attention kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.engine.device import synchronize
from shoal.engine.kernels.flash_attention import flash_attention
from shoal.engine.models.segments import document_segments
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.item import GpuSetting, attempt
from shoal.labs.bench.race import time_in_turns
from shoal.spec.catalog import ModelShape, model_shape

MODEL, TINY = "llama-3-8b", "tiny"
TOKENS = 8192
DOCUMENT = 1024  # tokens of a packed document
SECONDS = 0.05  # of one turn on a GPU; on the CPU a turn is one call
FLOAT32 = "fp32"
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, FLOAT32: torch.float32}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: the median of three turns of about `SECONDS`, after a warm-up."""
    if device.type == "cpu":
        return time_in_turns({"": call}, 1, warmup=0)[""][0]
    for _ in range(2):  # the first may compile or choose a kernel
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
    calls = max(1, min(200, int(SECONDS / max(1e-6, time.perf_counter() - begin))))
    return median(time_in_turns({"": call}, 3, in_a_row=calls, device=device)[""])


def layer_shape(setting: GpuSetting) -> ModelShape:
    return model_shape(setting.pick(MODEL, TINY))


def product_sides(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs (k, n) of a layer's products, and of the head's."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q, k, v": (shape.hidden, q + 2 * kv), "out": (q, shape.hidden), "gate, up": (shape.hidden, 2 * shape.ffn),
        "down": (shape.ffn, shape.hidden), "head": (shape.hidden, shape.vocab),
    }  # fmt: skip


def measure_copies(setting: GpuSetting) -> Iterator[Row]:
    """Time copies inside the device, and between it and page-locked and pageable host memory."""
    device, size = setting.torch_device, setting.pick(2**30, 2**22)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.ones(size, dtype=torch.uint8)
    locked = pageable if setting.rehearsal else pageable.pin_memory()
    for name, to, value, moved in (
        ("copy in device memory", target, source, 2 * size), ("page-locked host to device", target, locked, size),
        ("device to page-locked host", locked, source, size), ("pageable host to device", target, pageable, size),
    ):  # fmt: skip
        seconds = time_call(partial(to.copy_, value, non_blocking=True), device)
        yield {"transfer": name, "bytes": size, "GB/s": moved / seconds / 1e9}
    seconds = time_call(partial(torch.add, source[:1], 1, out=target[:1]), device)
    yield {"transfer": "launch of one kernel", "us": 1e6 * seconds}


def time_products(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return the seconds of Y = X W^T, dX = dY W and dW = dY^T X of a linear layer of m tokens."""
    x, w, dy = (torch.randn(sides, device=device).to(dtype) for sides in ((m, k), (n, k), (m, n)))
    calls = {"forward": lambda: x @ w.t(), "input gradient": lambda: dy @ w, "weight gradient": lambda: dy.t() @ x}
    return {name: time_call(call, device) for name, call in calls.items()}


def attained_flops(shape: ModelShape, tokens: int, device: torch.device) -> float:
    """Return the FLOP/s of all products of one layer, forward and backward, in bf16."""
    sides = {name: of for name, of in product_sides(shape).items() if name != "head"}
    seconds = sum(sum(time_products(tokens, *of, torch.bfloat16, device).values()) for of in sides.values())
    return sum(6 * tokens * k * n for k, n in sides.values()) / seconds


def measure_products(setting: GpuSetting, kind: str) -> Iterator[Row]:
    """Time products of the layer's shapes, and a square one, in one number format."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    tokens = setting.pick(TOKENS, 64)
    sides = product_sides(layer_shape(setting)) | {"square": (tokens, tokens)}
    for name, (k, n) in sides.items():
        seconds = time_products(tokens, k, n, FORMATS[kind], setting.torch_device)
        rates = {way: 2 * tokens * k * n / each for way, each in seconds.items()}
        yield {
            "product": name, "m": tokens, "k": k, "n": n,
            **{f"{way} TFLOP/s": rate / 1e12 for way, rate in rates.items()},
            "% of peak": setting.share_of_peak(max(rates.values()), kind),
        }


def measure_scaled_products(setting: GpuSetting, scales: str) -> Iterator[Row]:
    """Time 8-bit products with one scale for a tensor, a row or a block, with and without fast accumulation."""
    device, tokens = setting.torch_device, setting.pick(TOKENS, 128)
    for name, (k, n) in (product_sides(layer_shape(setting)) | {"square": (tokens, tokens)}).items():
        if k % 128 or n % 128:  # the head of a vocabulary that is not padded
            continue
        a = torch.randn(tokens, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        for fast in (False, True):
            row: dict[str, Any] = {"product": name, "m": tokens, "k": k, "n": n, "fast accumulation": fast}
            with attempt(row):
                rate = 2 * tokens * k * n / time_call(_scaled_product(a, b, scales, fast), device)
                row |= {"TFLOP/s": rate / 1e12, "% of peak": setting.share_of_peak(rate, "fp8")}
            yield row


def _scaled_product(a: Tensor, b: Tensor, scales: str, fast: bool) -> Callable[[], Tensor]:
    """Return the product of codes a [m, k] and b [k, n] in bf16, with scales of 1."""
    (m, k), n = a.shape, b.shape[1]
    ones = partial(torch.ones, device=a.device)
    if scales == "block":  # layouts: scale of a [m, k / 128] with rows adjacent; k / 128 of b padded to a multiple of 4
        from torch.nn.functional import ScalingType, scaled_mm

        of_a, of_b = ones(k // 128, m).t(), ones(n // 128, -(-k // 512) * 4).t()
        ways = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return lambda: scaled_mm(
            a, b, of_a, ways[0], of_b, ways[1], output_dtype=torch.bfloat16, use_fast_accum=fast
        )
    of_a, of_b = (ones(m, 1), ones(1, n)) if scales == "row" else (ones(()), ones(()))
    return lambda: torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


# ---- attention -------------------------------------------------------------------------------------------------------


def measure_attention(setting: GpuSetting, kernel: str) -> Iterator[Row]:
    """Time one attention kernel forward and backward, causal or within documents, on sequences of 4k and 8k."""
    device, dtype = setting.torch_device, setting.pick(torch.bfloat16, torch.float32)
    shape, total = layer_shape(setting), setting.pick(2 * TOKENS, 256)
    for s in setting.pick((4096, 8192), (128,)):
        for grouped in (True, False):
            kv = shape.kv_heads if grouped else shape.heads
            heads = (shape.heads, kv, kv)
            q, k, v = (
                torch.randn(total // s, n, s, shape.head_dim, device=device, dtype=dtype, requires_grad=True)
                for n in heads
            )
            seen = DOCUMENT if kernel.startswith("documents") else s
            flops = 2 * total * min(seen, s) * shape.heads * shape.head_dim  # of the causal half
            row: dict[str, Any] = {"sequence": s, "heads": f"{shape.heads}/{kv} x {shape.head_dim}"}
            with attempt(row):
                attend = _attention(kernel, q, k, v)
                out = attend()
                grad = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
                forward, backward = time_call(attend, device), time_call(grad, device)
                row |= {
                    "forward ms": 1e3 * forward, "backward ms": 1e3 * backward,
                    "forward TFLOP/s": flops / forward / 1e12, "backward TFLOP/s": 2.5 * flops / backward / 1e12,
                }
            yield row


KERNELS = (*BACKENDS, "documents, lengths", "documents, flex", "documents, dense mask")


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a call of the kernel on q [b, a, s, d] and k, v [b, kv, s, d]."""
    b, _, s, _ = q.shape
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    if kernel in BACKENDS:

        def attend() -> Tensor:
            with sdpa_kernel(BACKENDS[kernel]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)

        return attend
    documents = torch.arange(s) // DOCUMENT
    if kernel == "documents, lengths":
        segments = document_segments(documents.expand(b, s), s, q.device)
        return lambda: flash_attention(q, k, v, True, *segments)[0]
    number = documents.to(q.device)
    if kernel == "documents, dense mask":
        mask = (number[:, None] == number) & torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **grouped)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not q.is_cuda:
        raise NotImplementedError("backward of flex attention needs a GPU")
    blocks = create_block_mask(
        lambda b, h, i, j: (i >= j) & (number[i] == number[j]), None, None, s, s, device=q.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks, **grouped)
