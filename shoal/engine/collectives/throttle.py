"""A network between ranks that have none, imitated by waiting.

Ranks of one host move what they exchange with the cores that they compute on, so nothing can be hidden behind anything.
On a network it is on its way while the cores do something else, and takes as long as its bytes do.
"""

from __future__ import annotations

import time

from shoal.engine.collectives.pending import Pending, Then


class ThrottledLink:
    """The one way out of a rank: what it sends goes one after another, at most so fast.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self._free = 0.0  # when all that was sent so far is through; of the monotonic clock

    @staticmethod
    def of(gbs: float) -> ThrottledLink | None:
        """One of so many GB/s; None for 0, which imitates none."""
        return ThrottledLink(1e9 * gbs) if gbs else None

    def send(self, size: float) -> None:
        """Queue so many bytes."""
        self._free = max(self._free, time.monotonic()) + size / self.rate

    def carry(self, work: Pending) -> Pending:
        """The same collective, which is not through before what was queued last is."""
        through = self._free
        return Then(work, lambda: time.sleep(max(0.0, through - time.monotonic())))
