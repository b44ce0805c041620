"""Triton programs of `shoal.engine.kernels.rotary`: one program per token and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # with 64 pairs each: 16 bytes at a time


@triton.jit
def forward_program(
    packed, cos, sin, q, k, v, positions, heads, kv_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    every, d = heads + 2 * kv_heads, 2 * half
    inside = (head < every) & (pair < half)
    first = tl.load(packed + (token * every + head) * d + pair, mask=inside, other=0).to(tl.float32)
    second = tl.load(packed + (token * every + head) * d + half + pair, mask=inside, other=0).to(tl.float32)
    turned = inside & (head < heads + kv_heads)
    at = (token % positions) * half + pair
    c = tl.where(turned, tl.load(cos + at, mask=pair < half, other=0).to(tl.float32), 1.0)
    s = tl.where(turned, tl.load(sin + at, mask=pair < half, other=0).to(tl.float32), 0.0)
    low = (first * c - second * s).to(q.dtype.element_ty)
    high = (second * c + first * s).to(q.dtype.element_ty)
    is_q = inside & (head < heads)
    to_q = q + (token * heads + head) * d + pair
    tl.store(to_q, low, mask=is_q)
    tl.store(to_q + half, high, mask=is_q)
    is_k = turned & (head >= heads)
    to_k = k + (token * kv_heads + head - heads) * d + pair
    tl.store(to_k, low, mask=is_k)
    tl.store(to_k + half, high, mask=is_k)
    is_v = inside & (head >= heads + kv_heads)
    to_v = v + (token * kv_heads + head - heads - kv_heads) * d + pair
    tl.store(to_v, low, mask=is_v)
    tl.store(to_v + half, high, mask=is_v)


@triton.jit
def backward_program(
    d_q, d_k, d_v, cos, sin, out, positions, heads, kv_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    every, d = heads + 2 * kv_heads, 2 * half
    inside = (head < every) & (pair < half)
    turned = inside & (head < heads + kv_heads)
    is_q = inside & (head < heads)
    from_q = d_q + (token * heads + head) * d + pair
    first = tl.load(from_q, mask=is_q, other=0).to(tl.float32)
    second = tl.load(from_q + half, mask=is_q, other=0).to(tl.float32)
    is_k = turned & (head >= heads)
    from_k = d_k + (token * kv_heads + head - heads) * d + pair
    first += tl.load(from_k, mask=is_k, other=0).to(tl.float32)
    second += tl.load(from_k + half, mask=is_k, other=0).to(tl.float32)
    is_v = inside & (head >= heads + kv_heads)
    from_v = d_v + (token * kv_heads + head - heads - kv_heads) * d + pair
    first += tl.load(from_v, mask=is_v, other=0).to(tl.float32)
    second += tl.load(from_v + half, mask=is_v, other=0).to(tl.float32)
    at = (token % positions) * half + pair
    c = tl.where(turned, tl.load(cos + at, mask=pair < half, other=0).to(tl.float32), 1.0)
    s = tl.where(turned, tl.load(sin + at, mask=pair < half, other=0).to(tl.float32), 0.0)
    to = out + (token * every + head) * d + pair
    tl.store(to, (first * c + second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c - first * s).to(out.dtype.element_ty), mask=inside)


def forward(packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `forward_program`; arguments and results as of the operator."""
    packed, (b, s, width) = packed.contiguous(), packed.shape
    every = heads + 2 * kv_heads
    d = width // every
    q, k, v = (packed.new_empty(b, s, n, d) for n in (heads, kv_heads, kv_heads))
    forward_program[(b * s, triton.cdiv(every, HEADS))](
        packed, cos.contiguous(), sin.contiguous(), q, k, v, *_sizes(cos, d, heads, kv_heads),
        HEADS=HEADS, HALF=triton.next_power_of_2(d // 2),
    )
    return q, k, v


def backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Launch `backward_program`; arguments and results as of the operator."""
    assert d_q.is_contiguous() and d_k.is_contiguous() and d_v.is_contiguous()
    (b, s, heads, d), kv_heads = d_q.shape, d_k.shape[2]
    every = heads + 2 * kv_heads
    out = d_q.new_empty(b, s, every * d)
    backward_program[(b * s, triton.cdiv(every, HEADS))](
        d_q, d_k, d_v, cos.contiguous(), sin.contiguous(), out, *_sizes(cos, d, heads, kv_heads),
        HEADS=HEADS, HALF=triton.next_power_of_2(d // 2),
    )
    return out


def _sizes(cos: Tensor, d: int, heads: int, kv_heads: int) -> tuple[int, int, int, int]:
    return cos.numel() // (d // 2), heads, kv_heads, d // 2
