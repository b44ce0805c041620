"""Triton program of `shoal.engine.kernels.merge_attention`: one program per head and block of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit
def merge_program(
    out, total, block_out, block_total, heads, n, d,
    out_b, out_a, out_n, total_b, total_a, total_n, new_b, new_a, new_n, new_total_b, new_total_a, new_total_n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, a = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at_total = total + b * total_b + a * total_a + row * total_n
    old = tl.load(at_total, mask=row < n, other=0)
    new = tl.load(
        block_total + b * new_total_b + a * new_total_a + row * new_total_n, mask=row < n, other=-float("inf")
    )
    share = tl.where(new == -float("inf"), 0.0, 1 / (1 + tl.exp(old - new)))
    most = tl.maximum(old, new)
    most = tl.where(most == -float("inf"), 0.0, most)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row[:, None] < n) & (column < d)
    at = out + b * out_b + a * out_a + row[:, None] * out_n + column
    kept = tl.load(at, mask=inside, other=0)
    block = block_out + b * new_b + a * new_a + row[:, None] * new_n + column
    added = tl.load(block, mask=inside, other=0).to(tl.float32)
    tl.store(at, kept + share[:, None] * (added - kept), mask=inside)
    tl.store(at_total, most + tl.log(tl.exp(old - most) + tl.exp(new - most)), mask=row < n)


def merge(out: Tensor, total: Tensor, block_out: Tensor, block_total: Tensor) -> None:
    """Launch `merge_program`; arguments as of `merge_attention_`, the accumulated ones in float32."""
    b, a, n, d = out.shape
    strides = (*out.stride()[:3], *total.stride(), *block_out.stride()[:3], *block_total.stride())
    grid = (triton.cdiv(n, ROWS), b * a)
    merge_program[grid](
        out, total, block_out, block_total, a, n, d, *strides, ROWS=ROWS, WIDTH=triton.next_power_of_2(d)
    )
