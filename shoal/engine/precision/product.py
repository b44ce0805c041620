"""Product of two matrices of 8-bit or 4-bit codes.

On hardware, in 8 bits, it is `torch._scaled_mm`: the public `torch.nn.functional.scaled_mm` has no e5m2 with scales of
blocks. In 4 bits it is the latter, which multiplies by the factors of both tensors before it rounds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import ScalingType, SwizzleType

from shoal.engine.precision.float8 import ROW, TENSOR, Codes

_LEVELS = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_LAYOUT = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


def multiply(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute a b^T: [m, k], [n, k] -> [m, n].

    Args:
        fast: let hardware accumulate with fewer bits (14 on Hopper; DeepSeek-AI 2024, section 3.3.2), if it is faster.
    """
    if not a.for_hardware:
        return F.linear(a.values(dtype), b.values(dtype))
    if a.grain.scale == "nv":
        return F.scaled_mm(
            a.codes.view(torch.float4_e2m1fn_x2), b.codes.view(torch.float4_e2m1fn_x2).t(), split_scale(a.scale),
            _LEVELS, split_scale(b.scale), _LEVELS, _LAYOUT, _LAYOUT, output_dtype=dtype,
        )  # fmt: skip
    scale_a, scale_b = operand_scales(a, b)
    return torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype,
        use_fast_accum=fast and a.grain in (TENSOR, ROW),
    )  # fmt: skip


def split_scale(scale: Tensor) -> list[Tensor]:
    """Return the two levels of scales of NVFP4: of blocks, in tiles of 512 bytes, and after them that of the tensor."""
    size = len(scale) % 512
    blocks, factor = scale.split([len(scale) - size, size])
    return [blocks, factor.view(torch.float32 if size == 4 else torch.float64)]


def operand_scales(a: Codes, b: Codes) -> tuple[Tensor, Tensor]:
    """Return the scales of both operands as `torch._scaled_mm` takes them."""
    if a.grain == TENSOR:
        return a.scale.view(()), b.scale.view(())
    return a.scale, b.scale if a.grain.scale == "mx" else b.scale.t()


@custom_op("shoal::float8_multiply_into", mutates_args=("total",))
def multiply_into(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor) -> None:
    """Compute a b^T into ``total``, as `multiply` does on hardware."""
    torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=total.dtype, out=total)
