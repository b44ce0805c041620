"""Every call that touches the file system, so that another kind of storage has one file to replace.

What is written is on the disk when the function returns (fsync), and a folder appears under its name whole or not at
all (rename within one file system is atomic).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from safetensors import safe_open

WRITE_BYTES = 16 << 20  # per system call: other threads run meanwhile, and Linux takes at most 2 GiB


def make_folder(path: Path) -> None:
    """Create a folder and its parents; one that exists is left as it is."""
    path.mkdir(parents=True, exist_ok=True)


def names(folder: Path) -> list[str]:
    """The entries of a folder, sorted; none where there is no such folder."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def exists(path: Path) -> bool:
    """Whether there is anything of this name."""
    return os.path.lexists(path)


def is_own(path: Path) -> bool:
    """Whether a file, if it is there, lies in its folder: not a link to elsewhere, a pipe or a device.

    Raises:
        OSError: it is not there, or is a link to itself.
    """
    regular = stat.S_ISREG(path.stat().st_mode)
    return regular and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def size(path: Path) -> int:
    """Bytes in a file."""
    return path.stat().st_size


def read(path: Path, count: int = -1) -> bytes:
    """The first ``count`` bytes of a file, or all."""
    with path.open("rb") as file:
        return file.read(count)


def open_tensors(path: Path) -> safe_open:
    """A safetensors file, mapped into memory: only the pages that are used are read."""
    return safe_open(path, framework="pt", device="cpu")


def write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, part after part, to the disk.

    Raises:
        FileExistsError: nothing is ever written over.
    """
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view[:WRITE_BYTES]):]
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a folder its new name in one step; both names have the same parent.

    Raises:
        OSError: ``new`` exists and is not an empty folder.
    """
    os.rename(old, new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Delete a folder and all in it, if it is there."""
    shutil.rmtree(path, ignore_errors=True)


def lock(path: Path) -> IO[str] | None:
    """Hold a lock file until the result is closed or the process dies; None where another process holds it.

    A POSIX record lock: it is not inherited by child processes, so an orphan cannot keep it.
    """
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
