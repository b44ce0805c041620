"""Stochastic rounding to bfloat16 (Gupta et al. 2015, section 2.1), with counter-based random bits."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.models.initial import shift_right

_LOW = (1 << 16) - 1  # the bits of a float32 beyond bfloat16


def draw_bits(key: int | Tensor, positions: Tensor) -> Tensor:
    """Return 32 random bits per int64 position, as int32: Wellons 2018, "Prospecting for Hash Functions" (lowbias32).

    Args:
        key: a `stream_key` of the tensor and the update, or other bits; its low 32 bits are used.
    """
    x = (positions ^ key).to(torch.int32)
    x = (x ^ shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ shift_right(x, 15)) * (0x846CA68B - (1 << 32))
    return x ^ shift_right(x, 16)


def round_stochastically(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Round float32 ``x`` to bfloat16 ``out``: away from 0 with a probability equal to the fraction of a unit in the
    last place.

    Non-finite values are preserved. ``bits`` are random int32, one per element.
    """
    x = x.nan_to_num(torch.nan, torch.inf, -torch.inf)  # canonical NaN: adding bits keeps it NaN
    rounded = (x.view(torch.int32) + (bits & _LOW)) & ~_LOW
    out.copy_(rounded.view(torch.float32))
