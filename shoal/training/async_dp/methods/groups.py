"""Communication partners in each step of methods without all-to-all exchange."""

from __future__ import annotations

from collections.abc import Sequence


def exponential(step: int, here: int, ranks: Sequence[int]) -> tuple[int, int]:
    """Return the rank that ``here`` sends to in a step, and the one that it receives from.

    The directed exponential graph with one peer per step (Assran et al. 2019, section 3 and appendix A): hops of 1, 2,
    4, ... in cyclic order, so that after ceil(log2 n) steps every rank has received information from every other.

    >>> [exponential(step, 0, range(8)) for step in range(4)]
    [(1, 7), (2, 6), (4, 4), (1, 7)]
    """
    n, place = len(ranks), ranks.index(here)
    hop = 1 << (step % hops(n))
    return ranks[(place + hop) % n], ranks[(place - hop) % n]


def hops(ranks: int) -> int:
    """Return the number of different hops of the exponential graph, at least 1."""
    return max(1, (ranks - 1).bit_length())


def tournament(step: int, ranks: Sequence[int], size: int) -> list[list[int]]:
    """Return the groups of one step, each of ``size`` ranks; the remaining ranks form a smaller group.

    The circle method of round-robin tournaments: ranks sit around a table, all but the first move one seat per step,
    and opposite ranks meet. In n - 1 steps (n if odd) every pair meets once in groups of 2, and at least once in groups
    of a larger even size, which join neighbouring pairs.

    >>> [tournament(step, range(4), 2) for step in range(3)]
    [[[0, 3], [1, 2]], [[0, 2], [3, 1]], [[0, 1], [2, 3]]]
    """
    if size >= len(ranks):
        return [list(ranks)]
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    first, *others = seats
    turn = step % len(others)
    table = [first, *others[len(others) - turn :], *others[: len(others) - turn]]
    half = len(table) // 2
    order = [rank for pair in zip(table[:half], reversed(table[half:]), strict=True) for rank in pair]
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    return [[rank for rank in group if rank is not None] for group in groups]
