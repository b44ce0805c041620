"""Quantisation of matrices: codes in e4m3, e5m2 or e2m1 (4 bits), and scales for blocks of them.

A code has 1 to 3 bits after the leading one and a range of a few decades, so a matrix is first multiplied by a scale
that brings its largest element close to the format's maximum. Elements that share a scale:

    tensor   all                                 Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3
    row      a row along the contraction         as in `torch._scaled_mm`
    block    128 of a row; of weights 128 x 128  DeepSeek-AI 2024, "DeepSeek-V3", section 3.3; scales are powers of two
    mx       32 of a row                         Open Compute Project 2023, "Microscaling Formats", version 1.0
    nv       16 of a row; of weights 16 x 16     NVIDIA 2025, arXiv 2509.25149, appendix B

Matrices are [m, k], where k is the dimension that a product sums over. In float64 the same rules apply, so that their
rounding is the only loss of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.spec.number_formats import E2M1, E4M3, E5M2, Format

_MX_EXPONENTS = (-127, 127)  # E8M0, the format of a scale (OCP MX, section 5.4.1)


class Grain(NamedTuple):
    """Block of elements that share a scale.

    Attributes:
        rows, columns: size of a block; 0 is the full dimension.
        scale: "exact" maps the largest element to the format's maximum; "power" rounds this down to a power of two;
            "mx" only uses exponents, so that elements above the format's maximum in the same octave saturate (OCP MX,
            section 6.3); "nv" uses e4m3 numbers, times one factor of the tensor that maps the largest of them to 448.
    """

    rows: int
    columns: int
    scale: str = "exact"


TENSOR, ROW = Grain(0, 0), Grain(1, 0)


class Codes(NamedTuple):
    """A matrix in 8 or 4 bits.

    Attributes:
        codes: [m, k], float8; e2m1 as numbers of e4m3, which has all of them. For products on hardware, two codes of
            e2m1 in a byte, [m, k / 2].
        scale: [m / rows, k / columns], the factors that the matrix was multiplied by. For products on hardware, their
            inverses in the layout of `shoal.engine.kernels.quantise`.
        for_hardware: whether codes and scale are an operand of a product on hardware, or are decoded.
    """

    codes: Tensor
    scale: Tensor
    grain: Grain
    for_hardware: bool = False

    def t(self) -> Codes:
        """Return the transpose, for square blocks (or a single scale)."""
        return Codes(self.codes.t(), self.scale.t(), self.grain)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes, [m, k]."""
        return (self.codes.to(self.scale.dtype) / _spread(self.scale, self.codes.shape, self.grain)).to(dtype)


def largest(x: Tensor, grain: Grain) -> Tensor:
    """Return the largest absolute value of each block of x [m, k]: [m / rows, k / columns], at least float32."""
    m, k = x.shape
    rows, columns = grain.rows or m, grain.columns or k
    x = x.detach().abs()
    if m % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -m % rows))
    x = x.view(-(-m // rows), rows, -(-k // columns), columns)
    return x.amax((1, 3)).to(torch.promote_types(x.dtype, torch.float32))


def compute_scale(most: Tensor, kind: Format, grain: Grain, total: Tensor | None = None) -> Tensor:
    """Return the scales for the largest absolute values of blocks; 1 for 0.

    A scale and its inverse are both normal numbers, so blocks with very small values do not reach the format's
    maximum. Of "nv", nor do blocks whose e4m3 number would be less than its smallest, 2^-9.

    Args:
        total: "nv": largest absolute value of the tensor, if these blocks are a part of it.
    """
    if grain.scale == "nv":
        outer = compute_factor(most.max() if total is None else total)
        scale = outer / invert_scale(most, outer)
    elif grain.scale == "mx":
        # frexp returns fractions in [1/2, 1): the exponent of the octave is one less
        above = torch.frexp(most).exponent - 1 - octave(kind)
        exponent = above.clamp(*_MX_EXPONENTS)
        scale = torch.ldexp(torch.ones_like(most), -exponent)
    else:
        scale = (kind.largest / most).clamp(max=1 / torch.finfo(most.dtype).tiny)  # infinity x 0 would be NaN
        if grain.scale == "power":
            scale = torch.ldexp(torch.ones_like(most), torch.frexp(scale).exponent - 1)
    # Keep non-finite values, so that the step is detected.
    return torch.where(most == 0, torch.ones_like(most), torch.where(most.isfinite(), scale, torch.nan))


def compute_factor(total: Tensor) -> Tensor:
    """Return the factor of a tensor with "nv" scales, given its largest absolute value."""
    return (E2M1.largest * E4M3.largest / total).clamp(max=2.0**E4M3.tiniest / torch.finfo(total.dtype).tiny)


def invert_scale(most: Tensor, factor: Tensor) -> Tensor:
    """Return the e4m3 numbers by which the factor of a tensor is divided in blocks: their "nv" scales."""
    inner = (most / E2M1.largest * factor).to(torch.float8_e4m3fn).to(most.dtype)
    return inner.clamp(min=2.0**E4M3.tiniest)


def encode(x: Tensor, scale: Tensor, kind: Format, grain: Grain, draws: Tensor | None = None) -> Codes:
    """Round x [m, k] to codes; values beyond the format's maximum saturate.

    Args:
        draws: e2m1: round stochastically, by uniform numbers in (0, 1), [m, k]; otherwise to the nearest, ties to even.
    """
    scaled = x.detach().to(scale.dtype) * _spread(scale, x.shape, grain)
    scaled = scaled.clamp_(-kind.largest, kind.largest)
    if kind == E2M1:
        return Codes(_round_to_e2m1(scaled, draws).to(torch.float8_e4m3fn), scale, grain)
    return Codes(scaled.to(getattr(torch, kind.name)), scale, grain)


def _round_to_e2m1(x: Tensor, draws: Tensor | None) -> Tensor:
    """Round x, of at most 6, to numbers of e2m1; see `encode`."""
    size = x.abs()
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    size = size / unit
    if draws is None:
        size = size.round()  # to even: of two neighbours the one with an even fraction
    else:
        low = size.floor()
        size = low + (draws < size - low)
    return (size * unit).copysign(x)


def octave(kind: Format) -> int:
    """Return the exponent of 2 of the format's maximum."""
    return {E4M3: 8, E5M2: 15}[kind]


def _spread(scale: Tensor, shape: torch.Size, grain: Grain) -> Tensor:
    """Expand the scales to one per element, or to a shape that broadcasts."""
    m, k = shape
    if scale.shape[0] > 1 and grain.rows > 1:
        scale = scale.repeat_interleave(grain.rows, 0)[:m]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(grain.columns, 1)[:, :k]
    return scale
