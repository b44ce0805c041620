"""Memory shared by the processes of one host, with counters for synchronisation.

A region is an anonymous file (``memfd_create``) that every member maps. It has no name, uses no space in /dev/shm, and
is freed by the kernel when the last member exits. Other members open it through the creator's ``/proc/PID/fd``.

A counter has one writer and its own cache line. Writers store data before they increment the counter; readers load the
counter before the data. x86-64 preserves the order of stores and of loads (Intel SDM, volume 3, section 8.2.2), so no
fences are needed; Python has none. Other processors give no such guarantee, and `host_identity` is None there.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

LINE = 64  # bytes of a cache line


def host_identity() -> str | None:
    """Return an identity shared by processes that can share memory: same boot, process id namespace and user.

    Returns None where the transport is not supported: not Linux, or not x86-64.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return None


class Region:
    """A mapped shared file, of which the caller closes the descriptor: counters, then ``size`` bytes of data.

    Attributes:
        counters: 64-bit numbers, counter i at index ``i * STEP``; all 0 in a new file.
    """

    STEP = LINE // 8

    def __init__(self, file: int, counters: int, size: int):
        head = -(-counters * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(file, head + size)
        self._mapped, self._head = mapped, head
        self.counters = memoryview(mapped)[:head].cast("Q")
        self.data = self.part(torch.uint8, 0, size)

    def part(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Return ``count`` elements from byte ``start`` of the data, as a tensor with exactly this storage."""
        return torch.frombuffer(self._mapped, dtype=dtype, offset=self._head + start, count=count)

    @staticmethod
    def create(counters: int, size: int) -> int:
        """Create a zero-filled file and return its descriptor. Pages are allocated when written.

        Raises:
            OSError: the system cannot provide the file.
        """
        file = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, -(-counters * LINE // mmap.PAGESIZE) * mmap.PAGESIZE + size)
        except OSError:
            os.close(file)
            raise
        return file


def alive(process: int) -> bool:
    """Return whether a process of this host is running; False for zombies."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
