"""Triton programs of `shoal.engine.kernels.rms_norm`: a program takes rows one after the other, each as one block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256
"""Maximum programs of a backward, each with a partial sum of the weight's gradient. A constant, so that the sum has the
same order on every GPU; two programs for each multiprocessor of an H100."""


@triton.jit
def forward_program(
    x, update, weight, total, y, inverse, most, eps, h, ADD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < h
    value = tl.load(x + row * h + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        value += tl.load(update + row * h + column, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)  # what backward reads
        tl.store(total + row * h + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(value * value, axis=0) / h + eps)
    tl.store(inverse + row, r)
    scale = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    normalised = (value * r * scale).to(y.dtype.element_ty)
    if WRITE:
        tl.store(y + row * h + column, normalised, mask=inside)
    else:  # the largest magnitude, by its bits, with NaN above infinity
        bits = tl.abs(normalised.to(tl.float32)).to(tl.int32, bitcast=True)
        tl.atomic_max(most, tl.max(bits, axis=0))


@triton.jit
def backward_program(
    d_y, d_total, total, weight, inverse, d_x, d_weights, rows, h, each, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < h
    scale = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program.to(tl.int64) * each
    for i in range(min(each, rows - program * each)):
        at = (first + i) * h + column
        value = tl.load(total + at, mask=inside, other=0).to(tl.float32)
        gradient = tl.load(d_y + at, mask=inside, other=0).to(tl.float32)
        r = tl.load(inverse + first + i)
        d_weight += gradient * value * r
        scaled = gradient * scale
        along = tl.sum(scaled * value, axis=0) * r * r * r / h
        out = scaled * r - value * along
        if ADD:
            out += tl.load(d_total + at, mask=inside, other=0).to(tl.float32)
        tl.store(d_x + at, out.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weights + program.to(tl.int64) * h + column, d_weight, mask=inside)


def forward(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    y = x.new_empty(x.shape)
    total, inverse = _forward(x, update, weight, eps, y, None)
    return total, y, inverse


def statistics(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    most = x.new_zeros(1, dtype=torch.int32)
    total, inverse = _forward(x, update, weight, eps, x, most)
    return total, inverse, most.view(torch.float32)


def _forward(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, y: Tensor, most: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    update = update if update is None else update.contiguous()
    h, rows = x.shape[-1], x.shape[:-1]
    total, inverse = x.new_empty(0 if update is None else x.shape), x.new_empty(rows, dtype=torch.float32)
    forward_program[(rows.numel(),)](
        x, update, weight, total, y, inverse, most, eps, h, ADD=update is not None, WRITE=most is None, **_sizes(h)
    )
    return total, inverse


def backward(
    d_y: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    assert d_y.is_contiguous() and (d_total is None or d_total.is_contiguous())
    total, h, rows = total.contiguous(), total.shape[-1], inverse.numel()
    if rows == 0:
        return total.new_empty(total.shape), torch.zeros_like(weight)
    each = triton.cdiv(rows, PROGRAMS)
    programs = triton.cdiv(rows, each)
    d_x, partial = total.new_empty(total.shape), total.new_empty(programs, h, dtype=torch.float32)
    backward_program[(programs,)](
        d_y, d_total, total, weight, inverse, d_x, partial, rows, h, each, ADD=d_total is not None, **_sizes(h)
    )
    return d_x, partial.sum(0).to(weight.dtype)


def _sizes(h: int) -> dict[str, int]:
    block = triton.next_power_of_2(h)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
