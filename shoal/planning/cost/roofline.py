"""Rooflines: whether arithmetic, memory or the network bounds an operation (Williams, Waterman & Patterson 2009).

An operation takes the longer of its FLOPs over the peak and its bytes over the bandwidth. Its arithmetic intensity is
FLOPs per byte. The ridge, where both times are equal, is peak over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperationCost:
    """FLOPs of an operation, and the bytes that it reads and writes, each operand once."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, peak: float, bandwidth: float) -> float:
        """Return the roofline's time in seconds, for a peak in FLOP/s and a bandwidth in bytes/s."""
        return max(self.flops / peak, self.bytes / bandwidth)


def matrix_product(m: float, k: int, n: int, itemsize: float = 2, result: int | None = None) -> OperationCost:
    """Return the cost of [m, k] x [k, n]: intensity 2 m k n / (e (m k + k n + m n)), about m in 16 bits for small m.

    Args:
        itemsize: e, bytes per element of both factors.
        result: bytes per element of the product, if different.

    >>> round(matrix_product(64, 8192, 8192).intensity)
    63
    """
    return OperationCost(2 * m * k * n, itemsize * (m * k + k * n) + (result or itemsize) * m * n)


def least_rows(k: float, n: float, ridge: float, itemsize: int = 2) -> float | None:
    """Return the least m for which [m, k] x [k, n] has the intensity of the ridge; None if no m is enough.

    Solves 2 m k n / (e (m k + k n + m n)) = ridge. For large k and n it is about e/2 times the ridge.

    >>> round(least_rows(16384, 16384, 295)), least_rows(64, 64, 295)
    (306, None)
    """
    left = 2 * k * n - itemsize * ridge * (k + n)
    return itemsize * ridge * k * n / left if left > 0 else None
