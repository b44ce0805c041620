"""How much muon multiplies, and how much of it at a time, without torch. `shoal.optim.muon` has the rule."""

AT_ONCE = 1 << 25
"""Elements of the buffer between the ranks; and of what one rank works on in a turn, if one matrix is not more."""


def nearly_square(shape: tuple[int, int]) -> bool:
    """Whether multiplying the polynomials of a matrix with each other first takes no fewer FLOPs than step by step, and
    more memory."""
    return 13 * max(shape) <= 15 * min(shape)


def orthogonal_flops(shape: tuple[int, int], *, wide: bool) -> int:
    """Of the products that make one matrix orthogonal (`shoal.optim.muon.orthogonal`).

    Each of five steps has a product of [n, m] with itself, n <= m, of 2 n^2 m FLOPs, one of 2 n^3 and one of 2 n^2 m.
    In wide formats what is symmetric counts 5/8; and there are one of the first kind, one of the last, and 17 of
    [n, n], unless it is nearly square.

    Args:
        shape: rows and columns.
        wide: in float32 or float64, as on the CPU; else in bfloat16.
    """
    n, m = min(shape), max(shape)
    if wide:
        return 5 * (13 * n * n * m + 5 * n**3) // 4 if nearly_square(shape) else (13 * n * n * m + 85 * n**3) // 4
    return 5 * (4 * n * n * m + 2 * n**3)
