"""What is to be done, as tickets that replicas take: each its own in turn, or whoever is free the next (a work queue).

A ticket is one replica's share of one step: its samples and its learning rate follow from it. Nobody takes a ticket of
a step beyond the *limit*, at which all meet; so at a meeting every ticket before it is done and none after it begun,
and the number of steps is all that a checkpoint has to record of the queue.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.engine.collectives.shm.window import Window

COUNTERS = 1  # and one for each replica


class Ticket(NamedTuple):
    """Share ``slot`` of step ``step``, both from 0."""

    step: int
    slot: int


class Queue:
    """The tickets of a run.

    Args:
        window: where its counters are, from ``first`` on: `COUNTERS` + the number of replicas.
        lock: its lock in the window.
        common: whether the replicas take from one queue.
    """

    def __init__(self, window: Window, first: int, lock: int, *, common: bool):
        self.window, self.first, self._lock, self.common = window, first, lock, common
        self.replicas = window.size

    def start(self, step: int, limit: int) -> None:
        """Begin at a step, and let tickets be taken up to ``limit``. For one replica, while no other takes any."""
        for replica in range(self.replicas):
            self.window.set(self._of(replica), step * (self.replicas if self.common else 1))
        self.window.set(self.first, limit)

    def _of(self, replica: int) -> int:
        return self.first + COUNTERS + (0 if self.common else replica)

    @property
    def limit(self) -> int:
        """The step at which all meet next."""
        return self.window.get(self.first)

    def take(self, replica: int) -> Ticket | None:
        """The next ticket for a replica; None where all must meet."""
        with self.window.lock(self._lock):
            number = self.window.get(self._of(replica))
            ticket = Ticket(*divmod(number, self.replicas)) if self.common else Ticket(number, replica)
            if ticket.step >= self.limit:
                return None
            self.window.set(self._of(replica), number + 1)
            return ticket

    def stop(self) -> None:
        """Have all meet as soon as they can: when the steps are done of which somebody has begun a part."""
        with self.window.lock(self._lock):
            numbers = [self.window.get(self._of(replica)) for replica in self.window.living()]
            begun = -(-max(numbers) // self.replicas) if self.common else max(numbers)
            self.window.set(self.first, min(self.limit, begun))
