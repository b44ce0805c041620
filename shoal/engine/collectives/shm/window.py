"""One-sided shared memory: every rank of a group reads and writes without participation of the others.

Asynchronous methods cannot use collectives; their parameter servers, inboxes and clocks are in a window. It is a
`Region` and therefore limited to one host. Its locks are POSIX record locks on the region's file, which the kernel
releases when a process exits for any reason.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group, map_region
from shoal.engine.collectives.json_collectives import all_gather
from shoal.engine.collectives.shm.progress import PeerLost, nap
from shoal.engine.collectives.shm.region import LINE, Region, alive, host_identity

LOOK_SECONDS = 0.05  # interval between checks that a rank is alive
MEND = "Start all ranks on one such host, or use a parallel.sync that communicates: local-sgd, diloco, powersgd."


class Window:
    """Counters, locks and tensors shared by the ranks of a group.

    `tensor`, `counters` and `locks` allocate them; all ranks must make the same calls. A counter is a 64-bit number,
    initially 0.

    Args:
        group: the ranks that create the window together; None for one rank.
        size: bytes of all tensors; unwritten pages take no memory.

    Raises:
        UsageError: a rank cannot map the memory, or ranks do not see each other's stores in order.
    """

    def __init__(self, group: Group | None, counters: int, size: int):
        self.size, self.index = (1, 0) if group is None else (group.size(), group.rank())
        self.ranks = [0] if group is None else group.ranks
        counters += self.size  # process ids
        size = -(-size // LINE) * LINE
        self._file, region = self._open(group, counters, size)
        weakref.finalize(self, os.close, self._file)
        self._counters, self._data, self._used = region.counters, region.data, 0
        self._next_counter = self._next_lock = 0
        self._process = counters - self.size
        self.set(self._process + self.index, os.getpid())
        if group is not None:
            dist.barrier(group.backend)  # all ranks have mapped the region
        self._dead: set[int] = set()
        self._looked = [0.0] * self.size

    def _open(self, group: Group | None, counters: int, size: int) -> tuple[int, Region]:
        """Open the region; return its file, which carries the locks, and its memory."""
        hosts = set(all_gather(host_identity(), None if group is None else group.backend))
        if None in hosts or len(hosts) > 1:
            raise UsageError(
                f"ranks {self.ranks} cannot share memory as they must: they are not all on one host with Linux on "
                f"x86-64, in one space of processes.\n  {MEND}"
            )
        made = None
        if group is not None:
            made = map_region(group.backend, counters, size, lambda file, region: (os.dup(file), region))
        else:
            with suppress(OSError):
                file = Region.create(counters, size)
                made = file, Region(file, counters, size)
        if made is None:
            raise UsageError(
                f"ranks {self.ranks} cannot share memory: the system gives none, or they may not see each other."
                f"\n  {MEND}"
            )
        return made

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next tensor [numel], initially zero, in memory shared by all ranks."""
        start, length = self._used, numel * dtype.itemsize
        self._used += -(-length // LINE) * LINE
        return self._data[start : start + length].view(dtype)

    # ---- counters and locks ------------------------------------------------------------------------------------

    def counters(self, count: int) -> int:
        """Return the first of the next ``count`` counters."""
        self._next_counter += count
        assert self._next_counter <= self._process, "a window has as many counters as it was made with"
        return self._next_counter - count

    def locks(self, count: int) -> int:
        """Return the first of the next ``count`` locks."""
        self._next_lock += count
        return self._next_lock - count

    def get(self, counter: int) -> int:
        return self._counters[counter * Region.STEP]

    def set(self, counter: int, value: int) -> None:
        """Write a counter. Readers of the new value also see all data written before it."""
        self._counters[counter * Region.STEP] = value

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    # ---- liveness ----------------------------------------------------------------------------------------------

    def alive(self, index: int, *, now: bool = False) -> bool:
        """Return whether a rank's process is running, at most `LOOK_SECONDS` out of date, or up to date if ``now``."""
        if index in self._dead:
            return False
        if now or time.monotonic() - self._looked[index] > LOOK_SECONDS:
            self._looked[index] = time.monotonic()
            if not alive(self.get(self._process + index)):
                self._dead.add(index)
        return index not in self._dead

    def living(self) -> list[int]:
        """Return the running ranks, in order."""
        return [index for index in range(self.size) if self.alive(index)]

    def until(self, condition: Callable[[], bool], who: Sequence[int] = (), what: str = "") -> None:
        """Wait for a condition.

        Args:
            who: ranks that the condition depends on; by default, none are checked.
            what: description for the error message.

        Raises:
            PeerLost: a rank of ``who`` has exited.
        """
        begin = time.monotonic()
        while not condition():
            for index in who:
                if not self.alive(index) and not condition():
                    raise PeerLost(f"{what}: rank {self.ranks[index]} has ended")
            nap(time.monotonic() - begin)
