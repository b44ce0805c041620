"""Triton program of `shoal.engine.kernels.rotary`: one program per token and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # with 64 pairs each: 16 bytes at a time


@triton.jit
def rotary_program(
    packed, cos, sin, q, k, v, positions, heads, kv_heads, half,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate from ``packed`` into q, k and v; or back, with the negative angles."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    every, d = heads + 2 * kv_heads, 2 * half
    inside = (head < every) & (pair < half)
    turned = inside & (head < heads + kv_heads)
    is_q, is_k, is_v = inside & (head < heads), turned & (head >= heads), inside & (head >= heads + kv_heads)
    at_packed = packed + (token * every + head) * d + pair
    at_q = q + (token * heads + head) * d + pair
    at_k = k + (token * kv_heads + head - heads) * d + pair
    at_v = v + (token * kv_heads + head - heads - kv_heads) * d + pair
    at = (token % positions) * half + pair
    c = tl.where(turned, tl.load(cos + at, mask=pair < half, other=0).to(tl.float32), 1.0)
    s = tl.where(turned, tl.load(sin + at, mask=pair < half, other=0).to(tl.float32), 0.0)
    if BACKWARD:
        s = -s
        first = tl.load(at_q, mask=is_q, other=0).to(tl.float32)
        second = tl.load(at_q + half, mask=is_q, other=0).to(tl.float32)
        first += tl.load(at_k, mask=is_k, other=0).to(tl.float32)
        second += tl.load(at_k + half, mask=is_k, other=0).to(tl.float32)
        first += tl.load(at_v, mask=is_v, other=0).to(tl.float32)
        second += tl.load(at_v + half, mask=is_v, other=0).to(tl.float32)
    else:
        first = tl.load(at_packed, mask=inside, other=0).to(tl.float32)
        second = tl.load(at_packed + half, mask=inside, other=0).to(tl.float32)
    low = (first * c - second * s).to(q.dtype.element_ty)
    high = (second * c + first * s).to(q.dtype.element_ty)
    if BACKWARD:
        tl.store(at_packed, low, mask=inside)
        tl.store(at_packed + half, high, mask=inside)
    else:
        tl.store(at_q, low, mask=is_q)
        tl.store(at_q + half, high, mask=is_q)
        tl.store(at_k, low, mask=is_k)
        tl.store(at_k + half, high, mask=is_k)
        tl.store(at_v, low, mask=is_v)
        tl.store(at_v + half, high, mask=is_v)


def forward(packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    packed, (b, s, width) = packed.contiguous(), packed.shape
    d = width // (heads + 2 * kv_heads)
    q, k, v = (packed.new_empty(b, s, n, d) for n in (heads, kv_heads, kv_heads))
    _launch(packed, cos, sin, q, k, v, backward=False)
    return q, k, v


def backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert d_q.is_contiguous() and d_k.is_contiguous() and d_v.is_contiguous()
    b, s, heads, d = d_q.shape
    out = d_q.new_empty(b, s, (heads + 2 * d_k.shape[2]) * d)
    _launch(out, cos, sin, d_q, d_k, d_v, backward=True)
    return out


def _launch(packed: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> None:
    (b, s, heads, d), kv_heads = q.shape, k.shape[2]
    rotary_program[(b * s, triton.cdiv(heads + 2 * kv_heads, HEADS))](
        packed, cos.contiguous(), sin.contiguous(), q, k, v, cos.numel() // (d // 2), heads, kv_heads, d // 2,
        BACKWARD=backward, HEADS=HEADS, HALF=triton.next_power_of_2(d // 2),
    )
