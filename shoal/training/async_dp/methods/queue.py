"""The steps to do, as tickets that replicas take: each its own in turn, or whoever is free the next (a work queue).

A ticket is one replica's share of one step: its samples and its learning rate follow from it. No ticket beyond the
*limit* is taken, where all replicas meet. So at a meeting every ticket before it is done and none after it begun, and
the number of steps is all that a checkpoint has to record of the queue.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.engine.collectives.shm.window import Window


class Ticket(NamedTuple):
    """Share ``slot`` of step ``step``, both from 0."""

    step: int
    slot: int


class Queue:
    """The tickets of a run.

    Args:
        window: of the replicas.
        common: whether all replicas take from one queue.
    """

    def __init__(self, window: Window, *, common: bool):
        self.window, self.common, self.replicas = window, common, window.size
        self._limit, self._taken, self._lock = window.counters(1), window.counters(window.size), window.locks(1)

    def start(self, step: int, limit: int) -> None:
        """Begin at a step, and let tickets be taken up to ``limit``. For one replica, while no other takes any."""
        for replica in range(self.replicas):
            self.window.set(self._counter(replica), step * (self.replicas if self.common else 1))
        self.window.set(self._limit, limit)

    def _counter(self, replica: int) -> int:
        return self._taken + (0 if self.common else replica)

    @property
    def limit(self) -> int:
        """The step at which all meet next."""
        return self.window.get(self._limit)

    def take(self, replica: int) -> Ticket | None:
        """The next ticket for a replica; None if all must meet."""
        with self.window.lock(self._lock):
            number = self.window.get(self._counter(replica))
            ticket = Ticket(*divmod(number, self.replicas)) if self.common else Ticket(number, replica)
            if ticket.step >= self.limit:
                return None
            self.window.set(self._counter(replica), number + 1)
            return ticket

    def stop(self) -> None:
        """Have all meet as soon as they can: when the steps are done of which a part has begun."""
        with self.window.lock(self._lock):
            numbers = [self.window.get(self._counter(replica)) for replica in self.window.living()]
            begun = -(-max(numbers) // self.replicas) if self.common else max(numbers)
            self.window.set(self._limit, min(self.limit, begun))
