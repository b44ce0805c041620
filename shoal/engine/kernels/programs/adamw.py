"""Triton program of `shoal.engine.kernels.adamw`: one program per tile of consecutive elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shoal.engine.kernels.programs.rounding import store_rounded

BLOCK = 1024


@triton.jit
def adamw_program(
    weights, gradient, mean, square, tiles, keys, scale, skip, shrink, decay, step, beta2, fresh1, fresh2, root2,
    eps, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles += tl.program_id(0) * 7
    start, stop, base = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2).to(tl.uint32)
    column, width, stride = tl.load(tiles + 3).to(tl.int32), tl.load(tiles + 4).to(tl.int32), tl.load(tiles + 5)
    keys += tl.load(tiles + 6) * 3
    weights_key, mean_key, square_key = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
    factor = tl.load(scale)
    count = tl.where(tl.load(skip) != 0, 0, stop - start).to(tl.int32)
    if ALIGNED:
        start, count = tl.multiple_of(start, 16), tl.multiple_of(count, 16)
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        at, inside = start + i, i < count
        column_now = column + i
        row = column_now // width
        position = base + row.to(tl.uint32) * stride.to(tl.uint32) + (column_now - row * width).to(tl.uint32)
        w = tl.load(weights + at, mask=inside, other=0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0).to(tl.float32) * factor
        m = tl.load(mean + at, mask=inside, other=0).to(tl.float32)
        v = tl.load(square + at, mask=inside, other=0).to(tl.float32)
        if DECOUPLED:
            w *= shrink
        else:
            g += w * decay
        m += (g - m) * fresh1
        v = v * beta2 + g * g * fresh2
        w -= step * m / (tl.sqrt_rn(v) / root2 + eps)
        store_rounded(weights + at, w, position, weights_key, inside)
        store_rounded(mean + at, m, position, mean_key, inside)
        store_rounded(square + at, v, position, square_key, inside)


def update(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, tiles: Tensor, keys: Tensor, scale: Tensor,
    skip: Tensor, rate: float, decay: float, beta1: float, beta2: float, eps: float, count: int, decoupled: bool,
    aligned: bool,
) -> None:  # fmt: skip
    bias1, bias2 = 1 - beta1**count, 1 - beta2**count
    numbers = (1 - rate * decay, decay, rate / bias1, beta2, 1 - beta1, 1 - beta2, bias2**0.5, eps)
    if len(tiles):
        adamw_program[(len(tiles),)](
            weights, gradient, mean, square, tiles, keys, scale, skip, *map(float, numbers),
            DECOUPLED=decoupled, ALIGNED=aligned, BLOCK=BLOCK,
        )  # fmt: skip
