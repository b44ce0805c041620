"""Memory that every rank of a group reads and writes when it likes, without the others' help.

What ranks do not wait for cannot be a collective: parameter servers, inboxes and clocks lie in a window. It is a
`Region`, so for the ranks of one host alone; its locks are the kernel's (POSIX record locks on the region's file),
which frees those of a process that ends, in whatever way.
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

LOOK_SECONDS = 0.05  # between looks whether a rank lives
MEND = "Start all ranks on one such host, or use a parallel.sync that communicates: local-sgd, diloco, powersgd."


class Window:
    """Counters, locks and tensors that the ranks of a group share.

    `tensor`, `counters` and `locks` hand them out, called alike on all ranks. A counter is a 64-bit number, 0 at first.

    Args:
        group: None for one rank. All of its ranks make the window together.
        counters: how many.
        size: bytes of all tensors; what is never written takes no memory.

    Raises:
        UsageError: not all ranks can map the memory, or do not see each other's stores in their order.
    """

    def __init__(self, group: Group | None, counters: int, size: int):
        self.size, self.index = (1, 0) if group is None else (group.size(), group.rank())
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group.backend)
        counters += self.size  # the processes
        size = -(-size // LINE) * LINE
        self._file, region = self._open(group, counters, size)
        weakref.finalize(self, os.close, self._file)
        self._counters, self._data, self._used = region.counters, region.data, 0
        self._next_counter = self._next_lock = 0
        self._process = counters - self.size
        self.set(self._process + self.index, os.getpid())
        if group is not None:
            dist.barrier(group.backend)  # all are there
        self._dead: set[int] = set()
        self._looked = [0.0] * self.size

    def _open(self, group: Group | None, counters: int, size: int) -> tuple[int, Region]:
        """The file, whose locks these are, and its memory."""
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
        """The next tensor [numel], zeros at first, the same memory on all ranks."""
        start, length = self._used, numel * dtype.itemsize
        self._used += -(-length // LINE) * LINE
        return self._data[start : start + length].view(dtype)

    # ---- counters and locks ------------------------------------------------------------------------------------

    def counters(self, count: int) -> int:
        """The first of the next ``count`` counters."""
        self._next_counter += count
        assert self._next_counter <= self._process, "a window has as many counters as it was made with"
        return self._next_counter - count

    def locks(self, count: int) -> int:
        """The first of the next ``count`` locks."""
        self._next_lock += count
        return self._next_lock - count

    def get(self, counter: int) -> int:
        """The value of a counter."""
        return self._counters[counter * Region.STEP]

    def set(self, counter: int, value: int) -> None:
        """Write a counter. Data that was written before is seen by whoever sees the new value."""
        self._counters[counter * Region.STEP] = value

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """Hold a lock; no other rank holds it meanwhile."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    # ---- who is there ------------------------------------------------------------------------------------------

    def alive(self, index: int, *, now: bool = False) -> bool:
        """Whether a rank's process runs; seen with a delay of `LOOK_SECONDS` at most, or none (``now``)."""
        if index in self._dead:
            return False
        if now or time.monotonic() - self._looked[index] > LOOK_SECONDS:
            self._looked[index] = time.monotonic()
            if not alive(self.get(self._process + index)):
                self._dead.add(index)
        return index not in self._dead

    def living(self) -> list[int]:
        """The ranks that run, in order."""
        return [index for index in range(self.size) if self.alive(index)]

    def until(self, there: Callable[[], bool], who: Sequence[int] = (), what: str = "") -> None:
        """Wait for a condition.

        Args:
            who: ranks without which it would never come true; by default, the wait has no such end.
            what: for the message.

        Raises:
            PeerLost: one of them has ended.
        """
        begin = time.monotonic()
        while not there():
            for index in who:
                if not self.alive(index) and not there():
                    raise PeerLost(f"{what}: rank {self.ranks[index]} has ended")
            nap(time.monotonic() - begin)
