"""CPU tuning: glibc malloc and the GEMM library.

By default glibc maps large blocks separately and trims the heap, so each step maps its tensors again, and the kernel
zeroes the pages. These settings keep freed memory in the process. ``docs/launch.md`` has the measured gain.
"""

from __future__ import annotations

import ctypes
import sys

from shoal.engine.models.products import tune_products

# Names and numbers: glibc manual, "Malloc Tunable Parameters"; numbers from <malloc.h>.
_SETTINGS = {
    "MALLOC_MMAP_MAX_": (-4, 0),  # never map blocks separately: large blocks come from the heap too
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),  # free bytes at the top of the heap before trimming: practically never
    "MALLOC_TOP_PAD_": (-2, 64 * 2**20),  # bytes requested beyond the need: fewer brk calls
}


def allocator_environment() -> dict[str, str]:
    """Return environment variables that configure the allocator of a new process (only glibc reads them)."""
    return {name: str(value) for name, (_, value) in _SETTINGS.items()}


def tune_allocator() -> bool:
    """Configure the allocator of this process for future allocations; return whether that worked (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(option, value) == 1 for option, value in _SETTINGS.values())


def tune_process(*, products: bool = True) -> None:
    """Configure the allocator, and with `products` the matrix product library, of this process."""
    tune_allocator()
    if products:
        tune_products()
