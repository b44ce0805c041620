"""Triton program of `shoal.engine.kernels.adam8bit`: one program per `BLOCKS` quantisation blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shoal.engine.kernels.programs.rounding import store_rounded

BLOCKS = 8


@triton.jit
def store_quantised(codes, scales, x, nearest, inside, number, used):
    """Store the codes and the scales of blocks ``x`` [BLOCKS, WIDTH]: `shoal.engine.kernels.adam8bit.quantise`."""
    largest = tl.max(tl.abs(x), axis=1)
    tl.store(scales + number, largest, mask=used)
    raised = tl.div_rn(x, tl.maximum(largest * 0.000030517578125, 1.1754943508222875e-38)[:, None])  # / 2^15
    bits = raised.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    tl.store(codes, tl.load(nearest + bits, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["key"])
def adam8bit_program(
    weights, gradient, mean_codes, square_codes, mean_scales, square_scales, levels, nearest, starts, moments, scale,
    skip, key, rows, columns, blocks, stride, shrink, step, fresh1, beta2, fresh2, bias2, eps,
    SHARED: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    used = number < tl.where(tl.load(skip) != 0, 0, rows * blocks)
    row = number // blocks
    column = (number - row * blocks)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = used[:, None] & (column < columns)
    at = row.to(tl.int64)[:, None] * stride + column
    w = tl.load(weights + at, mask=inside, other=0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0).to(tl.float32) * tl.load(scale)
    mean_code = tl.load(mean_codes + at, mask=inside, other=0).to(tl.int32)
    square_code = tl.load(square_codes + at, mask=inside, other=0).to(tl.int32)
    mean_scale = tl.load(mean_scales + number, mask=used, other=0)[:, None]
    square_scale = tl.load(square_scales + number, mask=used, other=0)[:, None]
    m = tl.where(inside, tl.load(levels + mean_code) * mean_scale, 0.0)
    v = tl.where(inside, tl.load(levels + 256 + square_code) * square_scale, 0.0)
    m += (g - m) * fresh1
    v = v * beta2 + g * g * fresh2
    w = w * shrink - step * m / (tl.sqrt_rn(v / bias2) + eps)
    if weights.dtype.element_ty == tl.bfloat16:
        first = tl.load(starts + row, mask=used, other=0)[:, None]
        store_rounded(weights + at, w, first + column, key, inside)
    else:
        tl.store(weights + at, w, mask=inside)
    if SHARED:
        at = row.to(tl.int64)[:, None] * columns + column
        tl.store(moments + at, m, mask=inside)
        tl.store(moments + at + rows * columns, v, mask=inside)
    else:
        store_quantised(mean_codes + at, mean_scales, m, nearest, inside, number, used)
        store_quantised(square_codes + at, square_scales, v, nearest + 65536, inside, number, used)


def update(
    weights: Tensor, gradient: Tensor, mean_codes: Tensor, square_codes: Tensor, mean_scales: Tensor,
    square_scales: Tensor, levels: Tensor, nearest: Tensor, starts: Tensor, moments: Tensor, scale: Tensor,
    skip: Tensor, key: int, rate: float, decay: float, beta1: float, beta2: float, eps: float, count: int,
    *, width: int,
) -> None:  # fmt: skip
    """Launch `adam8bit_program` for blocks of ``width`` elements."""
    (rows, columns), blocks = weights.shape, mean_scales.shape[1]
    key = (key & 0xFFFFFFFF) - ((key & 0x80000000) << 1)  # the low 32 bits, signed
    bias1, bias2 = 1 - beta1**count, 1 - beta2**count
    numbers = (1 - rate * decay, rate / bias1, 1 - beta1, beta2, 1 - beta2, bias2, eps)
    adam8bit_program[(triton.cdiv(rows * blocks, BLOCKS),)](
        weights, gradient, mean_codes, square_codes, mean_scales, square_scales, levels, nearest, starts, moments,
        scale, skip, key, rows, columns, blocks, weights.stride(0), *map(float, numbers), SHARED=moments.numel() > 0,
        BLOCKS=BLOCKS, WIDTH=width,
    )  # fmt: skip
