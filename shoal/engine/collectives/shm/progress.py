"""What one process has under way in shared memory: operations, in steps that are done wherever it waits.

Nothing happens in the background: cores are what the ranks compute with. What was started and could not be completed at
once is done where this process waits next, for that operation or for any other of any of its groups. So ranks may wait
in different orders, as long as each waits in the end.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

SPINS = 50  # looks at the counters before the core is offered to others
YIELDS = 500  # offers of the core before sleeping
NAP, LONGEST_NAP = 50e-6, 1e-3  # seconds
NAP_SHARE = 0.02  # of the time waited so far: each look takes a core from others
CHECK_SECONDS = 0.05  # between looks whether the rank that is waited for still lives

MOVED = -1  # what a step yields that did something; else it yields the rank that it waits for
Steps = Iterator[int]


def nap(waited: float) -> None:
    """Sleep between two looks at what has been waited for so many seconds."""
    time.sleep(min(max(NAP, NAP_SHARE * waited), LONGEST_NAP))


class Peers(Protocol):
    """The ranks of a group, as far as waiting for one of them asks."""

    ranks: list[int]

    def end_of(self, index: int) -> str:
        """How the rank at this place of the group ended; "" while it lives."""


class PeerLost(RuntimeError):
    """A rank that this one waited for has ended or left the group."""


class Operation:
    """A collective or a transfer on its way."""

    def __init__(self, what: str, progress: Progress):
        self.what, self.parts, self._progress = what, 0, progress

    def is_completed(self) -> bool:
        """Whether this rank has done its part; what can be done at once of what is under way is done by asking."""
        while self.parts and self._progress.advance():
            pass
        return self.parts == 0

    def wait(self) -> None:
        """Until its result can be used.

        Raises:
            PeerLost: a rank that must take part has ended.
            TimeoutError: nothing moved for as long as the group's timeout.
        """
        if self.parts:
            self._progress.wait(self)


class Lane:
    """Steps that are done in order, one operation's after the other's."""

    def __init__(self, group: Peers):
        self.group: Peers = weakref.proxy(group)
        self.queue: deque[tuple[Operation, Steps]] = deque()

    def advance(self) -> int:
        """Do one step: MOVED, or the rank that it waits for."""
        operation, steps = self.queue[0]
        result = next(steps, None)
        if result is not None:
            return result
        self.queue.popleft()
        operation.parts -= 1
        return MOVED


class Progress:
    """What one process has under way, in all its groups.

    Args:
        timeout: seconds for which nothing may move while this rank waits.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.lanes: list[Lane] = []  # those with something in their queue

    def add(self, lane: Lane, operation: Operation, steps: Steps) -> None:
        """Queue a part of an operation."""
        operation.parts += 1
        lane.queue.append((operation, steps))
        if len(lane.queue) == 1:
            self.lanes.append(lane)

    def advance(self) -> bool:
        """Do one step, wherever one can be done; whether there was one."""
        return any(self._step(lane) == MOVED for lane in self.lanes)

    def _step(self, lane: Lane) -> int:
        """Do one step of a lane."""
        result = lane.advance()
        if not lane.queue:
            self.lanes.remove(lane)
        return result

    def drive(self, lane: Lane) -> None:
        """Do the steps of one lane as far as they go now."""
        while lane.queue and lane.advance() == MOVED:
            pass
        if not lane.queue and lane in self.lanes:
            self.lanes.remove(lane)

    def wait(self, operation: Operation) -> None:
        """Until it is complete; meanwhile everything else goes on too."""
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
                self._look_after(operation, now - start)

    def _look_after(self, operation: Operation, waited: float) -> None:
        """Give up on a rank that has ended, or on waiting."""
        for lane in self.lanes:
            if (awaited := self._step(lane)) == MOVED:
                return
            what = lane.queue[0][0].what
            # What it did before it ended still counts: so look once more after having seen the end.
            if end := lane.group.end_of(awaited):
                if self._step(lane) == awaited:
                    raise PeerLost(f"{what}: {end}")
                return
            if waited > self.timeout:
                raise TimeoutError(
                    f"{operation.what}: nothing moved for {self.timeout:g} s; {what} waits for "
                    f"rank {lane.group.ranks[awaited]}"
                )
