"""Stochastic rounding: up or down by chance, so that what is too small to be seen in one update counts in the mean.

A weight in bfloat16 has 8 digits. An update of less than half of the last one is lost when it is rounded to the
nearest, in every step alike; rounded up with the probability of what it is of the last digit, it is there on average
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 2.1).

The draws are a function of (seed, name, number of the update, index) alone, as initial values are: any layout rounds
alike, and a resumed run goes on with the same.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LOW = (1 << 16) - 1  # the bits of a float32 that a bfloat16 lacks


def key_of(seed: int, name: str, kind: str, update: int) -> int:
    """A signed 32-bit number for all draws of one tensor in one update."""
    digest = hashlib.sha256(f"{seed}:{name}:{kind}:{update}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def draws(key: int, positions: Tensor) -> Tensor:
    """32 random bits for each int64 position, int32: Wellons 2018, "Prospecting for Hash Functions" (lowbias32)."""
    x = positions.to(torch.int32) ^ key
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * (0x846CA68B - (1 << 32))
    return x ^ _shift(x, 16)


def round_stochastically(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Round float32 ``x`` to bfloat16 ``out``: away from 0 with the probability that is the rest's part of a digit.

    What is not finite stays so.

    Args:
        bits: int32 draws, one for each element.
    """
    x = x.nan_to_num(torch.nan, torch.inf, -torch.inf)  # NaN with one bit set, to which something can be added
    whole = (x.view(torch.int32) + (bits & _LOW)) & ~_LOW
    out.copy_(whole.view(torch.float32))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int32's own keeps the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
