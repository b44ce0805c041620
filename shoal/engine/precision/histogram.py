"""How often numbers of which size occur, and what part of them a number format has no place for.

Bins are quarters of an octave, from the upper bits of a float32: 8 of the exponent, 2 of the fraction. Bin 0 is 0 (and
what float32 can hardly tell from it); the last four are infinities and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.spec.number_formats import Format

BINS = 1024
PER_OCTAVE = 4
_FRACTION_BITS = 21  # of a float32, below the two that count
_BIAS = 127


def count(x: Tensor) -> Tensor:
    """[BINS] int64: how many elements are in each bin."""
    bits = x.detach().float().abs().contiguous().view(torch.int32) >> _FRACTION_BITS
    return torch.bincount(bits.flatten(), minlength=BINS)


def bin_of(x: float) -> int:
    """The bin of a number from 2^-126 on."""
    fraction, exponent = math.frexp(x)  # fraction in [1/2, 1)
    return (exponent - 1 + _BIAS) * PER_OCTAVE + int((2 * fraction - 1) * PER_OCTAVE)


def octave_of(bin: int) -> int:
    """The exponent of 2 of a bin's numbers."""
    return bin // PER_OCTAVE - _BIAS


def limits(kind: Format) -> tuple[int, int]:
    """(first, last) bins of what a format does not round to 0 or to more than its largest number.

    Half of the smallest number is rounded to 0, so the bins from there on are in.
    """
    low = bin_of(2.0 ** max(kind.tiniest - 1, -126))
    fraction, _ = math.frexp(kind.largest)
    # 448 = 1.75 x 2^8 is where a bin begins that the format has no more of; 65504 is in one that it has
    begins = (2 * fraction) * PER_OCTAVE % 1 == 0
    return low, min(bin_of(min(kind.largest, 2.0**127 * 1.75)) - begins, BINS - PER_OCTAVE - 1)


def shares(counts: Sequence[int], kind: Format, *, scaled: bool = False) -> tuple[float, float]:
    """The parts of the numbers other than 0 that are lost below, and that are beyond the largest.

    Args:
        counts: [BINS].
        scaled: after multiplication by the power of two that takes the largest of them into the format's last octave.
    """
    seen = [i for i in range(1, BINS) if counts[i]]
    if not seen:
        return 0.0, 0.0
    low, high = limits(kind)
    finite = [i for i in seen if i < BINS - PER_OCTAVE]
    shift = (high - finite[-1]) // PER_OCTAVE * PER_OCTAVE if scaled and finite else 0
    total = sum(counts[i] for i in seen)
    below = sum(counts[i] for i in finite if i + shift < low)
    above = sum(counts[i] for i in seen if i + shift > high or i >= BINS - PER_OCTAVE)
    return below / total, above / total
