"""Product of two matrices in 16 bits, accumulated in float32: a weight gradient goes into its buffer in one pass.

cuBLAS accumulates such products in float32 anyway and can add them to a float32 matrix. This saves the rounding, the
product's own memory, and the pass that would add it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.engine.kernels.example import Example
from shoal.engine.operators import custom_op


@custom_op("shoal::add_product", mutates=("total",))
def add_product(total: Tensor, d_y: Tensor, x: Tensor, fresh: bool) -> None:
    """Add dY^T X to ``total`` in place, or overwrite it if ``fresh``: [n, out], [n, in] -> [out, in] float32."""
    product = d_y.to(total.dtype).t() @ x.to(total.dtype)
    (total.copy_ if fresh else total.add_)(product)


@add_product.register_kernel("cuda")
def _(total: Tensor, d_y: Tensor, x: Tensor, fresh: bool) -> None:
    if fresh:
        torch.mm(d_y.t(), x, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, d_y.t(), x, out_dtype=total.dtype, out=total)


def _two_terms(total: Tensor, d_y: Tensor, x: Tensor) -> Tensor:
    add_product(total, d_y, x, True)
    add_product(total, x.flip(0)[:, : d_y.shape[1]].contiguous(), x, False)
    return total


def _two_terms_reference(total: Tensor, d_y: Tensor, x: Tensor) -> Tensor:
    x = x.double()
    return (d_y.double() + x.flip(0)[:, : d_y.shape[1]]).t() @ x


def examples() -> Iterator[Example]:
    """Yield a product that overwrites, followed by one that is added."""
    d_y, x = (torch.randn(50, n).to(torch.bfloat16) for n in (24, 40))
    total = torch.full((24, 40), torch.nan)
    yield Example(
        "add_product", _two_terms, _two_terms_reference, (total, d_y, x), dtypes=(torch.float32,), gradients=(),
        tolerance=1e-5,
    )
