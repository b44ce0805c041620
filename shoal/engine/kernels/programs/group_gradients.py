"""Triton program of `shoal.engine.kernels.group_gradients`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def add_program(total, products, ends, size, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    """Process a block of one group's matrix, which has ``size`` elements."""
    group = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    filled = tl.load(ends + group) > start
    value = tl.load(products + group * size + place, mask=inside & filled, other=0).to(total.dtype.element_ty)
    if FRESH:
        tl.store(total + group * size + place, value, mask=inside)
    else:
        value += tl.load(total + group * size + place, mask=inside & filled, other=0)
        tl.store(total + group * size + place, value, mask=inside & filled)


def add_group_gradients(total: Tensor, products: Tensor, ends: Tensor, fresh: bool) -> None:
    """Launch `add_program` on contiguous [E, n, k]."""
    assert total.is_contiguous() and products.is_contiguous(), "views of a flat buffer, and a new tensor"
    size = total[0].numel()
    add_program[(triton.cdiv(size, BLOCK), len(total))](total, products, ends, size, FRESH=fresh, BLOCK=BLOCK)
