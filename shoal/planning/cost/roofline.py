"""Rooflines: whether arithmetic, memory or the network bounds an operation (Williams, Waterman & Patterson 2009).

An operation takes the longer of its FLOPs over the peak and its bytes over the bandwidth. Its arithmetic intensity is
FLOPs per byte. The ridge, where both times are equal, is peak over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.spec.catalog import Accelerator


@dataclass(frozen=True)
class OperationCost:
    """FLOPs and bytes of an operation.

    Attributes:
        flops: arithmetic.
        bytes: bytes read and written, each operand once.
    """

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, peak: float, bandwidth: float) -> float:
        """Return the roofline's time in seconds.

        Args:
            peak: FLOP/s.
            bandwidth: bytes/s.
        """
        return max(self.flops / peak, self.bytes / bandwidth)


def dot_product(n: int, itemsize: int = 2) -> OperationCost:
    """Return the cost of a dot product of n numbers: intensity (2 n - 1) / (e (2 n + 1)), 1/2 in 16 bits for any n.

    >>> round(dot_product(10**6).intensity, 3)
    0.5
    """
    return OperationCost(2 * n - 1, itemsize * (2 * n + 1))


def matrix_product(m: float, k: int, n: int, itemsize: int = 2, result: int | None = None) -> OperationCost:
    """Return the cost of [m, k] x [k, n]: intensity 2 m k n / (e (m k + k n + m n)), about m in 16 bits for small m.

    Args:
        itemsize: e, bytes per element of both factors.
        result: bytes per element of the product, if different.

    >>> round(matrix_product(64, 8192, 8192).intensity)
    63
    """
    return OperationCost(2 * m * k * n, itemsize * (m * k + k * n) + (result or itemsize) * m * n)


def ridge(peak: float, bandwidth: float) -> float:
    """Return the FLOPs per byte above which arithmetic is the bound."""
    return peak / bandwidth


def least_compute_bound_batch(peak: float, bandwidth: float, *, weight_itemsize: int = 2) -> float:
    """Return the rows m above which [m, k] x [k, n] is bound by arithmetic, for m small relative to k and n.

    Mostly weights are read: 2 m k n FLOPs over e k n bytes, so m is the ridge times e/2; in 16 bits the ridge.

    >>> round(least_compute_bound_batch(1979e12, 3.35e12)), round(least_compute_bound_batch(989.4e12, 3.35e12))
    (591, 295)
    """
    return ridge(peak, bandwidth) * weight_itemsize / 2


def least_tokens_per_chip(accelerator: Accelerator, link_bandwidth: float, axes: int = 1) -> float:
    """Return the tokens per chip below which data parallelism, replicated or sharded, waits for the network.

    A step does 4 B D F / X FLOPs for every 4 D F bytes that it moves, so B/X must exceed the peak over the bandwidth
    (jax-ml/scaling-book, training).

    Args:
        link_bandwidth: bytes/s of one link of a torus in one direction. An axis has two links.
        axes: number of torus axes that data parallelism uses.
    """
    return accelerator.dense_flops("bf16") / (2 * link_bandwidth * axes)
