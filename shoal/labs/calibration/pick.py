"""Whether the layout that is estimated fastest is the fastest, of all that some ranks can have."""

from __future__ import annotations

from collections.abc import Callable

from shoal.labs.calibration.check import Compared, compare, every_layout
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

ROUND_TWO, FINAL = 12, 3
"""Layouts that are measured again: one step says too little of those that are nearly as fast, and the fastest of twelve
is so by luck in part, which measurements of its own do not have."""


def pick(pool: Pool, ranks: int, rounds: int, name: str, say: Callable[[float, str], None]) -> list[Compared]:
    """Measure every layout for a step, then in turn the fastest of them, then by new measurements the fastest of these;
    the one estimated fastest is among them each time.

    Args:
        rounds: turns of each that is measured again, and a third of those of the last.
        name: of the machine in the catalog.

    Returns:
        Those that were measured last, the one that is estimated fastest first.
    """
    found = compare(pool, every_layout(ranks), 1, name, lambda done, what: say(0.8 * done, what), steps=1)
    picked = min(found, key=lambda one: one.estimated).layout
    again = _fastest(found, picked, ROUND_TWO)
    found = compare(pool, again, rounds, name, lambda done, what: say(0.8 + 0.1 * done, what))
    last = _fastest(found, picked, FINAL)
    return compare(pool, last, 3 * rounds, name, lambda done, what: say(0.9 + 0.1 * done, what))


def _fastest(found: list[Compared], picked: Layout, count: int) -> list[Layout]:
    """The picked one, and the fastest others."""
    others = [one.layout for one in sorted(found, key=lambda one: one.measured) if one.layout != picked]
    return [picked, *others[:count]]
