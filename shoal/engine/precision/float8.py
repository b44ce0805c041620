"""Numbers in 8 bits: matrices as codes in e4m3 or e5m2 and scales for parts of them.

A code has 3 or 2 digits after the leading one and a range of a few powers of ten, so what a matrix holds is first
multiplied by a scale that takes its largest number near the format's largest. What part of the matrix shares a scale:

    tensor   all of it                           Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3
    row      a row along the contraction         as `torch._scaled_mm` takes it
    block    128 of a row; of weights 128 x 128  DeepSeek-AI 2024, "DeepSeek-V3", section 3.3; scales are powers of two
    mx       32 of a row                         Open Compute Project 2023, "Microscaling Formats", version 1.0

Matrices are [m, k] here, with k the dimension that a product sums over. On float64 the same rules hold: rounding to
8 bits is then all that a product loses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.spec.number_formats import E4M3, E5M2, Format

_MX_EXPONENTS = (-127, 127)  # of E8M0, the format of a scale (OCP MX, section 5.4.1)


class Grain(NamedTuple):
    """What shares a scale.

    Attributes:
        rows, columns: of a block; 0 is all of them.
        scale: "exact" takes the largest number to the format's largest; "power" rounds that down to a power of two;
            "mx" takes the exponents alone, so that what is above the largest number of its octave saturates (OCP MX,
            section 6.3).
    """

    rows: int
    columns: int
    scale: str = "exact"


TENSOR, ROW = Grain(0, 0), Grain(1, 0)


class Codes(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        codes: [m, k], float8.
        scale: [m / rows, k / columns]: what was multiplied by.
        grain: of the scales.
    """

    codes: Tensor
    scale: Tensor
    grain: Grain

    def t(self) -> Codes:
        """The transpose, of a matrix whose blocks are square (or all of it)."""
        return Codes(self.codes.t(), self.scale.t(), self.grain)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for, [m, k]."""
        return (self.codes.to(self.scale.dtype) / _spread(self.scale, self.codes.shape, self.grain)).to(dtype)


def largest(x: Tensor, grain: Grain) -> Tensor:
    """The largest absolute value of each block of x [m, k]: [m / rows, k / columns], float32 at least."""
    m, k = x.shape
    rows, columns = grain.rows or m, grain.columns or k
    x = x.detach().abs()
    if m % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -m % rows))
    x = x.view(-(-m // rows), rows, -(-k // columns), columns)
    return x.amax((1, 3)).to(torch.promote_types(x.dtype, torch.float32))


def scale_of(most: Tensor, kind: Format, grain: Grain) -> Tensor:
    """What to multiply by, from the largest absolute values; 1 where these are 0.

    Both a scale and its inverse are normal numbers: the largest of a tensor that is smaller than that allows for are
    further from the format's end.
    """
    if grain.scale == "mx":
        # frexp gives [1/2, 1): the exponent of the octave is one less
        octave = torch.frexp(most).exponent - 1 - _octave(kind)
        exponent = octave.clamp(*_MX_EXPONENTS)
        scale = torch.ldexp(torch.ones_like(most), -exponent)
    else:
        scale = (kind.largest / most).clamp(max=1 / torch.finfo(most.dtype).tiny)  # infinity x 0 would be NaN
        if grain.scale == "power":
            scale = torch.ldexp(torch.ones_like(most), torch.frexp(scale).exponent - 1)
    # What is not finite stays so: a step with it must be noticed.
    return torch.where(most == 0, torch.ones_like(most), torch.where(most.isfinite(), scale, torch.nan))


def encode(x: Tensor, scale: Tensor, kind: Format, grain: Grain) -> Codes:
    """Round x [m, k] to codes; what is beyond the format's largest number saturates."""
    scaled = x.detach().to(scale.dtype) * _spread(scale, x.shape, grain)
    codes = scaled.clamp_(-kind.largest, kind.largest).to(getattr(torch, kind.name))
    return Codes(codes, scale, grain)


def quantise(x: Tensor, kind: Format, grain: Grain) -> Codes:
    """With the scales that x itself asks for."""
    return encode(x, scale_of(largest(x, grain), kind, grain), kind, grain)


def _octave(kind: Format) -> int:
    """Exponent of 2 of the format's largest number."""
    return {E4M3: 8, E5M2: 15}[kind]


def _spread(scale: Tensor, shape: torch.Size, grain: Grain) -> Tensor:
    """A scale for each element, or what broadcasts to that."""
    m, k = shape
    if scale.shape[0] > 1 and grain.rows > 1:
        scale = scale.repeat_interleave(grain.rows, 0)[:m]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(grain.columns, 1)[:, :k]
    return scale
