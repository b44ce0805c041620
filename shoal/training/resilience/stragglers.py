"""Find stragglers: compare the compute time of each rank in a step and name the slowest."""

from __future__ import annotations

import statistics
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


def slowest(computing: list[float], hosts: list[str], total: float) -> Slowest:
    """Find the slowest rank from each rank's compute seconds in a step and its host.

    >>> slowest([1.0, 1.0, 3.0, 1.0], ["a", "a", "b", "b"], total=4.0).times
    3.0
    """
    worst = max(range(len(computing)), key=computing.__getitem__)
    waiting = tuple(max(0.0, total - one) for one in computing)
    return Slowest(
        worst, hosts[worst], computing[worst], statistics.median_low(computing), total, tuple(computing), waiting
    )
