"""Work queue of steps, as tickets that replicas take: each from its own queue, or all from a common one.

A ticket is one replica's share of one step; it determines the samples and the learning rate. No ticket at or beyond the
*limit* is given out; there all replicas meet. At a meeting all earlier tickets are done and no later one has started,
so a checkpoint need only record the number of steps.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.engine.collectives.shm.window import Window


class Ticket(NamedTuple):
    """Share ``slot`` of step ``step``, both from 0."""

    step: int
    slot: int


class Queue:
    """Tickets of a run, from one queue for all replicas if ``common``."""

    def __init__(self, window: Window, *, common: bool):
        self.window, self.common, self.replicas = window, common, window.size
        self._limit, self._taken, self._lock = window.counters(1), window.counters(window.size), window.locks(1)

    def start(self, step: int, limit: int) -> None:
        """Start at a step and allow tickets up to ``limit``. Call on one replica, while no other takes tickets."""
        for replica in range(self.replicas):
            self.window.set(self._counter(replica), step * (self.replicas if self.common else 1))
        self.window.set(self._limit, limit)

    def _counter(self, replica: int) -> int:
        return self._taken + (0 if self.common else replica)

    @property
    def limit(self) -> int:
        """Step of the next meeting."""
        return self.window.get(self._limit)

    def take(self, replica: int) -> Ticket | None:
        """Take the next ticket for a replica; None at the limit."""
        with self.window.lock(self._lock):
            number = self.window.get(self._counter(replica))
            ticket = Ticket(*divmod(number, self.replicas)) if self.common else Ticket(number, replica)
            if ticket.step >= self.limit:
                return None
            self.window.set(self._counter(replica), number + 1)
            return ticket

    def stop(self) -> None:
        """Lower the limit to the earliest possible meeting: the end of the steps that have started."""
        with self.window.lock(self._lock):
            numbers = [self.window.get(self._counter(replica)) for replica in self.window.living()]
            begun = -(-max(numbers) // self.replicas) if self.common else max(numbers)
            self.window.set(self._limit, min(self.limit, begun))
