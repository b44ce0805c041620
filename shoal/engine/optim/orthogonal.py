"""How much muon multiplies, and how much of it at a time, without torch. `shoal.engine.optim.muon` has the rule."""

from __future__ import annotations

from collections.abc import Sequence

AT_ONCE = 1 << 25
"""Elements of the buffer between the ranks; and of what one rank works on in a turn, if one matrix is not more."""


ROWS = 128
"""Of a symmetric product, that are made at once: fewer save more, and below are slower by about as much."""


APART = 16
"""Elements between the rows of what is symmetric: those that lie a power of two apart share few lines of the caches."""


def nearly_square(shape: Sequence[int]) -> bool:
    """Whether multiplying the polynomials of a matrix with each other first takes no fewer FLOPs than step by step, and
    more memory."""
    n, m = min(shape), max(shape)
    return m * (_multiplied(n) + n * n) <= 3 * n * _multiplied(n)


def orthogonal_flops(shape: tuple[int, int], *, wide: bool) -> int:
    """Of the products that make one matrix orthogonal (`shoal.engine.optim.muon.orthogonal`).

    Each of five steps has a product of [n, m] with itself, n <= m, of 2 n^2 m FLOPs, one of 2 n^3 and one of 2 n^2 m.
    In wide formats what is symmetric counts little more than half; and there are one of the first kind, one of the
    last, and 17 of [n, n], unless it is nearly square.

    Args:
        shape: rows and columns.
        wide: in float32 or float64, as on the CPU; else in bfloat16.
    """
    n, m = min(shape), max(shape)
    if not wide:
        return 5 * (4 * n * n * m + 2 * n**3)
    symmetric = _multiplied(n)
    if nearly_square(shape):
        return 5 * 2 * (symmetric * (m + n) + n * n * m)
    return 2 * (symmetric * (m + 17 * n) + n * n * m)


def _multiplied(n: int) -> int:
    """Elements of a symmetric [n, n] that are multiplied: `ROWS` at a time, to the diagonal. The others are copies."""
    ends = [min(start + ROWS, n) for start in range(0, n, ROWS)]
    return sum((end - start) * end for start, end in zip(range(0, n, ROWS), ends, strict=True))
