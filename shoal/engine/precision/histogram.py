"""Histograms of magnitudes, and the fraction of values outside a number format's range.

A bin is a quarter of an octave, from the upper bits of a float32: 8 of the exponent, 2 of the fraction. Bin 0 is 0
(and the smallest subnormals); the last four bins are infinities and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.spec.number_formats import Format

if TYPE_CHECKING:  # slow import
    from torch import Tensor

BINS = 1024
PER_OCTAVE = 4
_FRACTION_BITS = 21  # fraction bits of a float32 below the two that select the bin
_BIAS = 127


def count(x: Tensor) -> Tensor:
    """Count the elements in each bin: [BINS] int64."""
    import torch  # slow import

    bits = x.detach().float().abs().contiguous().view(torch.int32) >> _FRACTION_BITS
    return torch.bincount(bits.flatten(), minlength=BINS)


def find_bin(x: float) -> int:
    """Return the bin of a number of at least 2^-126."""
    fraction, exponent = math.frexp(x)  # fraction in [1/2, 1)
    return (exponent - 1 + _BIAS) * PER_OCTAVE + int((2 * fraction - 1) * PER_OCTAVE)


def to_octave(bin: int) -> int:
    """Return the exponent of 2 of a bin's values."""
    return bin // PER_OCTAVE - _BIAS


def limits(kind: Format) -> tuple[int, int]:
    """Return the (first, last) bins that a format does not round to 0 or clip at its maximum.

    Half of the smallest number rounds to 0, so the bins from there on are included.
    """
    low = find_bin(2.0 ** max(kind.tiniest - 1, -126))
    fraction, _ = math.frexp(kind.largest)
    # 448 = 1.75 x 2^8 starts a bin, which is above the format's range; 65504 lies inside a bin in its range
    begins = (2 * fraction) * PER_OCTAVE % 1 == 0
    return low, min(find_bin(min(kind.largest, 2.0**127 * 1.75)) - begins, BINS - PER_OCTAVE - 1)


def shares(counts: Sequence[int], kind: Format, *, scaled: bool = False) -> tuple[float, float]:
    """Return the fractions of non-zero values that underflow, and that exceed the maximum.

    Args:
        counts: [BINS].
        scaled: first multiply by the power of two that moves the largest value into the format's last octave.
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
