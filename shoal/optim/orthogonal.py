"""How much muon multiplies, and how much of it at a time, without torch. `shoal.optim.muon` has the rule."""

AT_ONCE = 1 << 25
"""Elements of the buffer between the ranks; and of what one rank works on in a turn, if one matrix is not more."""


def orthogonal_flops(shape: tuple[int, int], *, wide: bool) -> int:
    """Of the products that make one matrix orthogonal (`shoal.optim.muon.orthogonal`).

    Each of five steps has a product of [n, m] with itself, n <= m, of 2 n^2 m FLOPs, one of 2 n^3 and one of 2 n^2 m.
    In wide formats there are one of the first kind and one of the last if n < m, and 17 of [n, n], and what is
    symmetric counts half.

    Args:
        shape: rows and columns.
        wide: in float32 or float64, as on the CPU; else in bfloat16.
    """
    n, m = min(shape), max(shape)
    if wide:
        return 5 * (3 * n * n * m + n**3) if n == m else 3 * n * n * m + 17 * n**3
    return 5 * (4 * n * n * m + 2 * n**3)
