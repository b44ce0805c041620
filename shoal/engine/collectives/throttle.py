"""Simulated network: throttles collectives by sleeping.

Ranks of one host communicate with their compute cores, so communication cannot overlap computation. On the simulated
network, data is in flight while the cores compute, for a time proportional to its size.
"""

from __future__ import annotations

import time

from shoal.engine.collectives.pending import Pending, Then


class ThrottledLink:
    """Outgoing link of a rank with limited bandwidth, shared by everything it sends.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self._free = 0.0  # completion time of everything sent so far, on the monotonic clock

    @staticmethod
    def of(gbs: float) -> ThrottledLink | None:
        """Return a link of ``gbs`` GB/s; None for 0, which disables the simulation."""
        return ThrottledLink(1e9 * gbs) if gbs else None

    def send(self, size: float) -> None:
        """Queue ``size`` bytes."""
        self._free = max(self._free, time.monotonic()) + size / self.rate

    def carry(self, work: Pending) -> Pending:
        """Return the collective, delayed until the bytes queued last have been sent."""
        through = self._free
        return Then(work, lambda: time.sleep(max(0.0, through - time.monotonic())))
