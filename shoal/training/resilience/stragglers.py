"""Find stragglers: the seconds that each rank computes in a step, and the slowest rank by name."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

MEASURED = 10
"""Steps of which the times are taken, the last before each report: marks on a device are not free."""


@dataclass(frozen=True)
class Slowest:
    """The rank that computes longest in a step; all times in seconds."""

    rank: int
    host: str
    computing: float
    usual: float  # the median of all ranks
    total: float  # the whole step, the same for all
    ranks: tuple[float, ...]  # computing of every rank, in order
    waiting: tuple[float, ...]  # what is left of the step to every rank: waiting, exchanging, updating

    @property
    def times(self) -> float:
        """The ratio to the median."""
        return self.computing / self.usual if self.usual else 1.0

    def __str__(self) -> str:
        return (
            f"slowest: rank {self.rank} on {self.host} computes {self.computing:.3g} s of each step, "
            f"{self.times:.2f} times the median; the step takes {self.total:.3g} s"
        )


def slowest(computing: list[float], hosts: list[str], total: float) -> Slowest:
    """Find the slowest rank from every rank's seconds of computing in a step, and their hosts.

    >>> slowest([1.0, 1.0, 3.0, 1.0], ["a", "a", "b", "b"], total=4.0).times
    3.0
    """
    worst = max(range(len(computing)), key=computing.__getitem__)
    waiting = tuple(max(0.0, total - one) for one in computing)
    return Slowest(
        worst, hosts[worst], computing[worst], statistics.median_low(computing), total, tuple(computing), waiting
    )
