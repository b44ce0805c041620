"""Product of two matrices of 8-bit codes.

On hardware it is `torch._scaled_mm`: the public `torch.nn.functional.scaled_mm` has no e5m2 with scales of blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from shoal.engine.precision.float8 import ROW, TENSOR, Codes


def multiply(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute a b^T: [m, k], [n, k] -> [m, n].

    Args:
        fast: let hardware accumulate with fewer bits (14 on Hopper; DeepSeek-AI 2024, section 3.3.2), if it is faster.
    """
    if not a.for_hardware:
        return F.linear(a.values(dtype), b.values(dtype))
    scale_a, scale_b = operand_scales(a, b)
    return torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype,
        use_fast_accum=fast and a.grain in (TENSOR, ROW),
    )  # fmt: skip


def operand_scales(a: Codes, b: Codes) -> tuple[Tensor, Tensor]:
    """Return the scales of both operands as `torch._scaled_mm` takes them."""
    if a.grain == TENSOR:
        return a.scale.view(()), b.scale.view(())
    return a.scale, b.scale if a.grain.scale == "mx" else b.scale.t()


@custom_op("shoal::float8_multiply_into", mutates_args=("total",))
def multiply_into(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor) -> None:
    """Compute a b^T into ``total``, as `multiply` does on hardware."""
    torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=total.dtype, out=total)
