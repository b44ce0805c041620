"""Progress engine of shared-memory operations, which advance in steps whenever the process waits.

No background thread is used, because the ranks need all cores to compute. A started operation continues at the next
wait of this process, for any operation of any group, so ranks may wait in different orders.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

SPINS = 50  # polls of the counters before yielding the core
YIELDS = 500  # yields of the core before sleeping
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds
NAP_SHARE = 0.02  # fraction of the time waited so far: each poll takes a core from other processes
CHECK_SECONDS = 0.05  # interval between checks that the awaited rank is alive

MOVED = -1  # yielded by a step that made progress; other steps yield the rank that they wait for
Steps = Iterator[int]


def nap(waited: float) -> None:
    """Sleep between two polls, given the seconds waited so far."""
    time.sleep(min(max(NAP, NAP_SHARE * waited), LONGEST_NAP))


class Peers(Protocol):
    """Liveness of the ranks of a group."""

    ranks: list[int]

    def describe_end(self, index: int) -> str:
        """Return how the rank at this index of the group ended, or "" while it is alive."""


class PeerLost(RuntimeError):
    """Raised if a rank that this one waited for has exited or left the group."""


class Operation:
    """A collective or transfer in flight."""

    def __init__(self, what: str, progress: Progress):
        self.what, self.parts, self._progress = what, 0, progress

    def is_completed(self) -> bool:
        """Return whether this rank's part is complete, after advancing pending operations as far as possible."""
        while self.parts and self._progress.advance():
            pass
        return self.parts == 0

    def wait(self) -> None:
        """Wait until the result is available.

        Raises:
            PeerLost: a participating rank has exited.
            TimeoutError: no progress within the group's timeout.
        """
        if self.parts:
            self._progress.wait(self)


class Lane:
    """Queue of steps that run in order, one operation after the other."""

    def __init__(self, group: Peers):
        self.group: Peers = weakref.proxy(group)
        self.queue: deque[tuple[Operation, Steps]] = deque()


class Progress:
    """Operations of one process in flight, over all its groups."""

    def __init__(self, timeout: float):
        self.timeout = timeout  # maximum seconds without progress while this rank waits
        self.lanes: list[Lane] = []  # lanes with queued steps

    def add(self, lane: Lane, operation: Operation, steps: Steps) -> None:
        operation.parts += 1
        lane.queue.append((operation, steps))
        if len(lane.queue) == 1:
            self.lanes.append(lane)

    def advance(self) -> bool:
        """Run one step of any lane that can advance; return whether one did."""
        return any(self._step(lane) == MOVED for lane in self.lanes)

    def _step(self, lane: Lane) -> int:
        """Run one step of a lane; return MOVED, or the rank that it waits for."""
        operation, steps = lane.queue[0]
        result = next(steps, None)
        if result is not None:
            return result
        lane.queue.popleft()
        operation.parts -= 1
        if not lane.queue:
            self.lanes.remove(lane)
        return MOVED

    def drive(self, lane: Lane) -> None:
        """Run the steps of one lane until it has to wait."""
        while lane.queue and self._step(lane) == MOVED:
            pass

    def wait(self, operation: Operation) -> None:
        """Wait for an operation while advancing all others."""
        looks = 0
        while operation.parts:
            if self.advance():
                looks = 0
                continue
            looks += 1
            if looks <= SPINS:
                continue
            if looks <= SPINS + YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            if looks == SPINS + YIELDS + 1:
                start = check = now
            nap(now - start)
            if now - check > CHECK_SECONDS:
                check = now
                self._check_awaited(operation, now - start)

    def _check_awaited(self, operation: Operation, waited: float) -> None:
        """Raise if the awaited rank has exited or the timeout has passed."""
        for lane in self.lanes:
            if (awaited := self._step(lane)) == MOVED:
                return
            what = lane.queue[0][0].what
            # Its last writes still count, so poll once more after detecting the exit.
            if end := lane.group.describe_end(awaited):
                if self._step(lane) == awaited:
                    raise PeerLost(f"{what}: {end}")
                return
            if waited > self.timeout:
                raise TimeoutError(
                    f"{operation.what}: nothing moved for {self.timeout:g} s; {what} waits for "
                    f"rank {lane.group.ranks[awaited]}"
                )
