"""Weight gradients that are added to their buffers: products of two matrices.

cuBLAS accumulates products in 16 bits in float32 anyway and can add them to a float32 matrix. This saves the rounding,
the product's own memory, and the pass that would add it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.engine import kernels
from shoal.engine.kernels.example import Example
from shoal.engine.operators import custom_op


@custom_op("shoal::add_product", mutates=("total",))
def add_product(total: Tensor, d_y: Tensor, x: Tensor, fresh: bool) -> None:
    """Add dY^T X to ``total`` in place, or overwrite it if ``fresh``: [n, out], [n, in] -> [out, in] float32."""
    product = d_y.to(total.dtype).t() @ x.to(total.dtype)
    add_gradient(product, total, fresh)


@add_product.register_kernel("cuda")
def _(total: Tensor, d_y: Tensor, x: Tensor, fresh: bool) -> None:
    if fresh:
        torch.mm(d_y.t(), x, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, d_y.t(), x, out_dtype=total.dtype, out=total)


def accumulate_product(gradient: Tensor, x: Tensor, total: Tensor, fresh: bool) -> None:
    """Accumulate the weight gradient of a product: dY^T X of [.., out] and [.., in]."""
    d_y, x = gradient.flatten(0, -2), x.flatten(0, -2)
    if total.dtype == x.dtype:
        torch.mm(d_y.t(), x, out=total) if fresh else torch.addmm(total, d_y.t(), x, out=total)
    elif kernels.use_fused(total):  # bf16 products are accumulated in float32
        add_product(total, d_y, x, fresh)
    else:
        add_gradient(d_y.t() @ x, total, fresh)


def add_gradient(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    """Add a gradient to ``total`` in place, or overwrite it if ``fresh``."""
    (total.copy_ if fresh else total.add_)(gradient)


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
