"""Find stragglers: compare the compute time of each rank in a step and name the slowest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MEASURED = 10
"""Steps timed before each report; not all, as timing marks on a device have a cost."""


@dataclass(frozen=True)
class Slowest:
    """Slowest rank of a step; all times in seconds."""

    rank: int
    host: str
    computing: float
    usual: float  # median over all ranks
    total: float  # duration of the step, equal on all ranks
    ranks: tuple[float, ...]  # compute time by rank
    waiting: tuple[float, ...]  # remaining time by rank: waiting, communication, update

    @property
    def times(self) -> float:
        """Ratio of the slowest rank to the median."""
        return self.computing / self.usual if self.usual else 1.0

    def __str__(self) -> str:
        return (
            f"slowest: rank {self.rank} on {self.host} computes {self.computing:.3g} s of each step, "
            f"{self.times:.2f} times the median; the step takes {self.total:.3g} s"
        )


def find_slowest(ranks: Sequence[tuple[float, str]], total: float) -> Slowest:
    """Find the slowest rank from each rank's compute seconds in a step and its host.

    >>> find_slowest([(1.0, "a"), (1.0, "a"), (3.0, "b"), (1.0, "b")], total=4.0).times
    3.0
    """
    computing = tuple(seconds for seconds, _ in ranks)
    worst = computing.index(max(computing))
    waiting = tuple(max(0.0, total - seconds) for seconds in computing)
    return Slowest(worst, ranks[worst][1], max(computing), statistics.median_low(computing), total, computing, waiting)
