"""FLOPs and batch sizes of Muon's matrix products, without torch. See `shoal.engine.optim.muon` for the rule."""

from __future__ import annotations

from collections.abc import Sequence

AT_ONCE = 1 << 25
"""Elements of the communication buffer, and of a rank's matrices in one round unless a single matrix is larger."""


ROWS = 128
"""Rows of a symmetric product computed at once: fewer rows save more FLOPs, but run slower by about the same amount."""


APART = 16
"""Padding in elements between rows of symmetric matrices: rows a power of two apart conflict in the caches."""


def nearly_square(shape: Sequence[int]) -> bool:
    """Return whether multiplying the polynomials of a matrix with each other first takes at least as many FLOPs as the
    step-by-step order, and more memory."""
    n, m = min(shape), max(shape)
    return m * (_multiplied(n) + n * n) <= 3 * n * _multiplied(n)


def orthogonal_flops(shape: tuple[int, int], *, wide: bool) -> int:
    """Return the FLOPs to orthogonalise one matrix (`shoal.engine.optim.muon.orthogonal`).

    Each of five steps has a product of [n, m] with itself, n <= m, of 2 n^2 m FLOPs, one of 2 n^3 and one of 2 n^2 m.
    In wide formats, symmetric products cost little more than half. There, unless the matrix is nearly square, one
    product of the first kind, one of the last, and 17 of [n, n] suffice.

    Args:
        wide: products in float32 or float64, as on the CPU; else in bfloat16.
    """
    n, m = min(shape), max(shape)
    if not wide:
        return 5 * (4 * n * n * m + 2 * n**3)
    symmetric = _multiplied(n)
    if nearly_square(shape):
        return 5 * 2 * (symmetric * (m + n) + n * n * m)
    return 2 * (symmetric * (m + 17 * n) + n * n * m)


def _multiplied(n: int) -> int:
    """Return the elements of a symmetric [n, n] product that are computed, not copied: `ROWS` at a time, up to the
    diagonal."""
    ends = [min(start + ROWS, n) for start in range(0, n, ROWS)]
    return sum((end - start) * end for start, end in zip(range(0, n, ROWS), ends, strict=True))
