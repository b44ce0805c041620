"""CPU tuning: glibc's allocator and the library that multiplies matrices.

By default glibc maps every block above 128 KiB (a threshold that grows to 32 MiB at most) and gives the top of the heap
back whenever more than that is free. Each step then maps its tensors anew, and the kernel zeroes them page by page.
With the settings here freed memory stays in the process, so that the pages of one step serve the next;
``docs/launch.md`` has the measured gain.
"""

from __future__ import annotations

import ctypes
import sys

from shoal.engine.models.products import tune_products

# Names and numbers: glibc manual, "Malloc Tunable Parameters"; numbers from <malloc.h>.
_SETTINGS = {
    "MALLOC_MMAP_MAX_": (-4, 0),  # never map a block of its own: large blocks come from the heap too
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),  # bytes free at the top before any are given back: as good as never
    "MALLOC_TOP_PAD_": (-2, 64 * 2**20),  # bytes asked for beyond what is needed: fewer calls of brk
}


def allocator_environment() -> dict[str, str]:
    """Environment variables that set the allocator of a process from its start (only glibc reads them)."""
    return {name: str(value) for name, (_, value) in _SETTINGS.items()}


def tune_allocator() -> bool:
    """Do the same in this process, for blocks allocated from now on; returns whether it could (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(option, value) == 1 for option, value in _SETTINGS.values())


def tune_process(*, products: bool = True) -> None:
    """Set the allocator, and with `products` the library that multiplies, for this process from now on."""
    tune_allocator()
    if products:
        tune_products()
