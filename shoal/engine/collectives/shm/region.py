"""Memory that the processes of one host share, and counters in it by which they tell each other how far they are.

A region is an anonymous file (``memfd_create``) that every member maps. It has no name, needs no room in /dev/shm, and
the kernel frees it when the last member ends, in whatever way. Other members open it through the creator's
``/proc/PID/fd``.

A counter has one writer and is alone on its cache line. Writers store data first and count after; readers see the count
first and read the data after. x86-64 keeps the order of stores and that of loads (Intel SDM, volume 3, section 8.2.2),
so that no fence is needed, which Python has none of. On other processors nothing here would be right: `host_identity`
is None there.
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
    """Equal for processes that can share memory: one boot of one machine, one space of process ids, one user.

    None where there is no transport through memory: not Linux, or not x86-64.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return None


class Region:
    """One shared file, mapped.

    Args:
        file: a descriptor, which stays the caller's to close.
        counters: how many counters it begins with.
        size: bytes of data after them.

    Attributes:
        counters: 64-bit numbers, counter i at index ``i * STEP``; all 0 in a new file.
        data: the bytes after the counters.
    """

    STEP = LINE // 8

    def __init__(self, file: int, counters: int, size: int):
        head = -(-counters * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(file, head + size)
        self._mapped, self._head = mapped, head
        self.counters = memoryview(mapped)[:head].cast("Q")
        self.data = self.part(torch.uint8, 0, size)

    def part(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """``count`` elements from byte ``start`` of the data on, as a tensor whose storage is just these."""
        return torch.frombuffer(self._mapped, dtype=dtype, offset=self._head + start, count=count)

    @staticmethod
    def create(counters: int, size: int) -> int:
        """A new file of zeros, as a descriptor. It takes memory where it is written, page by page.

        Raises:
            OSError: the system gives none.
        """
        file = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, -(-counters * LINE // mmap.PAGESIZE) * mmap.PAGESIZE + size)
        except OSError:
            os.close(file)
            raise
        return file


def alive(process: int) -> bool:
    """Whether a process of this host still runs (one that ended and was not waited for does not)."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
