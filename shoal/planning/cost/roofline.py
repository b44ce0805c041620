"""Rooflines: what bounds an operation, arithmetic or memory or the network (Williams, Waterman & Patterson 2009).

An operation takes the longer of its FLOPs over the peak and its bytes over the bandwidth. Its arithmetic intensity is
FLOPs per byte; the ridge, where both take equally long, is at peak over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.spec.catalog import Accelerator


@dataclass(frozen=True)
class OperationCost:
    """What an operation does.

    Attributes:
        flops: arithmetic.
        bytes: read and written, each operand once.
    """

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, peak: float, bandwidth: float) -> float:
        """The roofline's time.

        Args:
            peak: FLOP/s.
            bandwidth: bytes/s.
        """
        return max(self.flops / peak, self.bytes / bandwidth)


def dot_product(n: int, itemsize: int = 2) -> OperationCost:
    """Of two vectors of n numbers: intensity (2 n - 1) / (e (2 n + 1)), 1/2 in 16 bits, whatever n is.

    >>> round(dot_product(10**6).intensity, 3)
    0.5
    """
    return OperationCost(2 * n - 1, itemsize * (2 * n + 1))


def matrix_product(m: float, k: int, n: int, itemsize: int = 2, result: int | None = None) -> OperationCost:
    """[m, k] x [k, n]: intensity 2 m k n / (e (m k + k n + m n)), about m in 16 bits where m is the small one.

    Args:
        itemsize: e, bytes of a number of both factors.
        result: of the product, if that is another.

    >>> round(matrix_product(64, 8192, 8192).intensity)
    63
    """
    return OperationCost(2 * m * k * n, itemsize * (m * k + k * n) + (result or itemsize) * m * n)


def ridge(peak: float, bandwidth: float) -> float:
    """FLOPs per byte from which on arithmetic is the bound."""
    return peak / bandwidth


def least_compute_bound_batch(peak: float, bandwidth: float, *, weight_itemsize: int = 2) -> float:
    """Rows m from which on [m, k] x [k, n] is bound by arithmetic, where m is small beside k and n.

    The weights are what is read: 2 m k n FLOPs over e k n bytes, so m is the ridge times e/2; in 16 bits the ridge.

    >>> round(least_compute_bound_batch(1979e12, 3.35e12)), round(least_compute_bound_batch(989.4e12, 3.35e12))
    (591, 295)
    """
    return ridge(peak, bandwidth) * weight_itemsize / 2


def least_tokens_per_chip(accelerator: Accelerator, link_bandwidth: float, axes: int = 1) -> float:
    """Tokens of each chip's share of the batch below which data parallelism, whole or sharded, waits for the network.

    A step does 4 B D F / X FLOPs for every 4 D F bytes that it moves, so B/X must exceed the peak over the bandwidth
    (jax-ml/scaling-book, training).

    Args:
        link_bandwidth: of one link of a torus in one direction, bytes/s. An axis has two.
        axes: of the torus that data parallelism uses.
    """
    return accelerator.dense_flops("bf16") / (2 * link_bandwidth * axes)
