"""Whether the layout that is estimated fastest is the fastest, of all that some ranks can have."""

from __future__ import annotations

from collections.abc import Callable

from shoal.bench.calibration.check import Compared, compare, every_layout
from shoal.comm.pool import Pool

ROUND_TWO = 12
"""Layouts that are measured again: one step says too little of those that are nearly as fast."""


def pick(pool: Pool, ranks: int, rounds: int, name: str, say: Callable[[float, str], None]) -> list[Compared]:
    """Measure every layout for a step, then in turn the fastest of them, and with them the one estimated fastest.

    Args:
        rounds: turns of each that is measured again.
        name: of the machine in the catalog.

    Returns:
        Those that were measured again, the one that is estimated fastest first.
    """
    every = compare(pool, every_layout(ranks), 1, name, lambda done, what: say(0.8 * done, what), steps=1)
    picked = min(every, key=lambda one: one.estimated)
    others = [one for one in sorted(every, key=lambda one: one.measured) if one is not picked][:ROUND_TWO]
    again = [one.layout for one in (picked, *others)]
    return compare(pool, again, rounds, name, lambda done, what: say(0.8 + 0.2 * done, what))
