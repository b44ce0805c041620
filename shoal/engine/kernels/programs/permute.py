"""Triton programs of `shoal.engine.kernels.permute`; offsets of rows are 64-bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns
TILE = 2048  # pairs of token and expert in one program of the sort


@triton.jit
def sort_program(
    position, token, expert, rows, ends, n, m, experts, k, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Scatter the running number of each pair, ``position`` [E, n], which counts from 1 in the order of rows."""
    first = tl.program_id(0) * TOKENS
    t = first + tl.arange(0, TOKENS)[:, None]
    e = tl.arange(0, EXPERTS)[None, :]
    inside = (t < n) & (e < experts)
    place = e * n + t
    number = tl.load(position + place, mask=inside, other=0)
    before = tl.load(position + place - 1, mask=inside & (place > 0), other=0)
    chosen = inside & (number != before)
    slot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    stored = chosen & (slot < k) & (number <= m)  # more choices than announced are dropped
    tl.store(token + number - 1, tl.broadcast_to(t, (TOKENS, EXPERTS)), mask=stored)
    tl.store(expert + number - 1, tl.broadcast_to(e, (TOKENS, EXPERTS)), mask=stored)
    tl.store(rows + t * k + slot, number - 1, mask=stored)
    filled = tl.sum(chosen.to(tl.int32), axis=1)[:, None]
    empty = tl.arange(0, K)[None, :]
    tl.store(rows + t * k + empty, tl.full((TOKENS, K), -1, tl.int32), mask=(t < n) & (empty >= filled) & (empty < k))
    tl.store(ends + e, tl.load(position + e * n + n - 1, mask=e < experts, other=0), mask=(e < experts) & (first == 0))
    total = tl.load(position + experts * n - 1)
    for start in range(first, m, tl.num_programs(0) * TOKENS):
        row = start + tl.arange(0, TOKENS)
        absent = tl.full((TOKENS,), -1, tl.int32)
        tl.store(token + row, absent, mask=(row >= total) & (row < m))
        tl.store(expert + row, absent, mask=(row >= total) & (row < m))


@triton.jit
def copy_program(x, token, out, h, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < h
    t = tl.load(token + row).to(tl.int64)
    value = tl.load(x + t * h + column, mask=inside & (t >= 0), other=0)
    tl.store(out + row * h + column, value, mask=inside)


@triton.jit
def sum_program(
    y, weights, expert, rows, out, h, experts, k, WEIGHTED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a token's rows in the order of its experts."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < h
    total = tl.zeros((BLOCK,), EXACT)
    for slot in range(k):
        row = tl.load(rows + t * k + slot).to(tl.int64)
        filled = row >= 0
        value = tl.load(y + row * h + column, mask=inside & filled, other=0).to(EXACT)
        if WEIGHTED:
            e = tl.load(expert + row, mask=filled, other=0)
            value *= tl.load(weights + t * experts + e, mask=filled, other=0).to(EXACT)
        total += value
    tl.store(out + t * h + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def spread_program(
    gradient, y, weights, token, expert, d_y, d_weights, h, experts, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradients of one row and of its weight."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(token + row).to(tl.int64)
    filled = t >= 0
    e = tl.load(expert + row)
    weight = tl.load(weights + t * experts + e, mask=filled, other=0).to(EXACT)
    total = tl.zeros((BLOCK,), EXACT)
    for start in range(0, h, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < h
        d_sum = tl.load(gradient + t * h + column, mask=inside & filled, other=0).to(EXACT)
        total += d_sum * tl.load(y + row * h + column, mask=inside & filled, other=0).to(EXACT)
        tl.store(d_y + row * h + column, (d_sum * weight).to(d_y.dtype.element_ty), mask=inside)
    tl.store(d_weights + t * experts + e, tl.sum(total, 0).to(d_weights.dtype.element_ty), mask=filled)


def sort_choices(chosen: Tensor, m: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, experts = chosen.shape
    position = chosen.t().to(torch.int32, memory_format=torch.contiguous_format).view(-1).cumsum(0, dtype=torch.int32)
    token, expert, rows, ends = (position.new_empty(size) for size in ((m,), (m,), (n, k), (experts,)))
    if n == 0:
        return token.fill_(-1), expert.fill_(-1), rows, ends.zero_()
    padded = triton.next_power_of_2(experts)
    tokens = max(1, TILE // padded)
    sort_program[(triton.cdiv(n, tokens),)](
        position, token, expert, rows, ends, n, m, experts, k,
        TOKENS=tokens, EXPERTS=padded, K=triton.next_power_of_2(k),
    )  # fmt: skip
    return token, expert, rows, ends


def copy_rows(x: Tensor, token: Tensor) -> Tensor:
    """Launch `copy_program`: [n, h] -> [m, h]."""
    x, h = x.contiguous(), x.shape[1]
    out = x.new_empty(len(token), h)
    if len(token):
        copy_program[(len(token), triton.cdiv(h, BLOCK))](x, token, out, h, BLOCK=BLOCK)
    return out


def sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """Launch `sum_program` without weights: [m, h] -> [n, h]."""
    return _sum(y, y, rows, rows, 0, weighted=False)


def combine_rows(y: Tensor, weights: Tensor, expert: Tensor, rows: Tensor) -> Tensor:
    """Launch `sum_program`: [m, h] -> [n, h]."""
    return _sum(y, weights.contiguous(), expert, rows, weights.shape[1], weighted=True)


def _sum(y: Tensor, weights: Tensor, expert: Tensor, rows: Tensor, experts: int, *, weighted: bool) -> Tensor:
    y, h, (n, k) = y.contiguous(), y.shape[1], rows.shape
    out = y.new_empty(n, h)
    sum_program[(n, triton.cdiv(h, BLOCK))](
        y, weights, expert, rows, out, h, experts, k, WEIGHTED=weighted, EXACT=_exact(y), BLOCK=BLOCK
    )
    return out


def combine_rows_backward(
    gradient: Tensor, y: Tensor, weights: Tensor, token: Tensor, expert: Tensor
) -> tuple[Tensor, Tensor]:
    assert gradient.is_contiguous()
    y, weights, h = y.contiguous(), weights.contiguous(), y.shape[1]
    d_y, d_weights = y.new_empty(y.shape), torch.zeros_like(weights)
    if len(y):
        spread_program[(len(y),)](
            gradient, y, weights, token, expert, d_y, d_weights, h, weights.shape[1], EXACT=_exact(y), BLOCK=BLOCK
        )
    return d_y, d_weights


def _exact(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
