"""Triton programs of `shoal.engine.kernels.cross_entropy`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LEAST = torch.finfo(torch.float32).min  # finite, because a rank may hold only padding


@triton.jit
def statistics_program(logits, target, total, at_target, n, columns, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: a running maximum, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.full((BLOCK,), LEAST, dtype=tl.float32)
    parts = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(logits + row * n + column, mask=inside, other=0).to(tl.float32)
        value = tl.where(inside, value, LEAST)
        higher = tl.maximum(most, value)
        parts = parts * tl.exp(most - higher) + tl.where(inside, tl.exp(value - higher), 0.0)
        most = higher
    highest = tl.max(most, axis=0)
    added = tl.sum(parts * tl.exp(most - highest), axis=0)
    tl.store(total + row, tl.where(columns > 0, highest + tl.log(added), LEAST))
    at = tl.load(target + row)
    tl.store(at_target + row, tl.load(logits + row * n + at, mask=at >= 0, other=0).to(tl.float32))


@triton.jit
def gradient_program(logits, target, total, scale, n, columns, BLOCK: tl.constexpr):
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * n + column
    value = tl.load(place, mask=column < columns, other=0).to(tl.float32)
    of_row = tl.load(scale + row)
    softmax = tl.where(column < columns, tl.exp(value - tl.load(total + row)), 0.0)
    one_hot = tl.where(column == tl.load(target + row), 1.0, 0.0)
    tl.store(place, ((softmax - one_hot) * of_row).to(logits.dtype.element_ty), mask=column < n)


def statistics(logits: Tensor, target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    logits, target = logits.contiguous(), target.contiguous()
    total, at_target = (logits.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    statistics_program[(target.numel(),)](
        logits, target, total, at_target, logits.shape[-1], columns, LEAST=LEAST, BLOCK=BLOCK, num_warps=8
    )
    return total, at_target


def gradient(logits: Tensor, target: Tensor, total: Tensor, scale: Tensor, columns: int) -> None:
    assert logits.is_contiguous(), "logits are overwritten"
    n = logits.shape[-1]
    gradient_program[(target.numel(), triton.cdiv(n, BLOCK))](
        logits, target.contiguous(), total.contiguous(), scale.contiguous(), n, columns, BLOCK=BLOCK, num_warps=8
    )
