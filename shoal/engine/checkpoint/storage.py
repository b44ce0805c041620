"""Every call that touches the file system, or what takes its place (`shoal.engine.checkpoint.remote`).

What is written is on the disk when the function returns (fsync), and a folder appears under its name whole or not at
all (rename within one file system is atomic).
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TypeGuard

from safetensors import safe_open

from shoal.engine.checkpoint.remote import Remote, RemoteTensors

WRITE_BYTES = 16 << 20  # per system call: other threads run meanwhile, and Linux takes at most 2 GiB


Place = Path | Remote
"""Where a checkpoint is, or a file of one."""

Tensors = safe_open | RemoteTensors

COMMITS = "manifest.json"
"""The file by which a folder in an object store is a checkpoint."""


def place(address: str | Path) -> Place:
    """A path, or an address with a protocol, as in ``s3://bucket/run``.

    Raises:
        UsageError: a protocol that nothing is known of.
    """
    return Remote.of(str(address)) if "://" in str(address) else Path(address)


def renames(folder: Place) -> TypeGuard[Path]:
    """Whether a folder there gets another name in one step."""
    return isinstance(folder, Path)


def make_folder(path: Place) -> None:
    """Create a folder and its parents; one that exists is left as it is."""
    if isinstance(path, Remote):
        path.make()
    else:
        path.mkdir(parents=True, exist_ok=True)


def names(folder: Place) -> list[str]:
    """The entries of a folder, sorted; none where there is no such folder."""
    if isinstance(folder, Remote):
        return folder.names()
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def exists(path: Place) -> bool:
    """Whether there is anything of this name."""
    return path.exists() if isinstance(path, Remote) else os.path.lexists(path)


def is_own(path: Place) -> bool:
    """Whether a file, if it is there, lies in its folder: not a link to elsewhere, a pipe or a device.

    Raises:
        OSError: it is not there, or is a link to itself.
    """
    if isinstance(path, Remote):
        return path.size() >= 0
    regular = stat.S_ISREG(path.stat().st_mode)
    return regular and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def size(path: Place) -> int:
    """Bytes in a file."""
    return path.size() if isinstance(path, Remote) else path.stat().st_size


def read(path: Place, count: int = -1) -> bytes:
    """The first ``count`` bytes of a file, or all."""
    if isinstance(path, Remote):
        return path.read(count)
    with path.open("rb") as file:
        return file.read(count)


def open_tensors(path: Place) -> Tensors:
    """A safetensors file, of which only the pages or bytes that are used are read."""
    return RemoteTensors(path) if isinstance(path, Remote) else safe_open(path, framework="pt", device="cpu")


def write(path: Place, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, part after part, to the disk.

    Raises:
        FileExistsError: on a disk, nothing is ever written over.
    """
    if isinstance(path, Remote):
        path.write(parts)
        return
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view[:WRITE_BYTES]):]
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder of a disk durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Place, new: Place) -> None:
    """Give a folder its new name; both names have the same parent. On a disk in one step; in an object store one of
    both has its manifest at any moment, or both.

    Raises:
        OSError: ``new`` exists and is not an empty folder.
    """
    if isinstance(old, Remote):
        assert isinstance(new, Remote)  # of the same parent
        old.move(new, COMMITS)
        return
    assert isinstance(new, Path)
    os.rename(old, new)
    sync_folder(new.parent)


def remove(path: Place) -> None:
    """Delete a folder and all in it, if it is there."""
    if isinstance(path, Remote):
        path.delete(COMMITS)
    else:
        shutil.rmtree(path, ignore_errors=True)


def lock(path: Place) -> IO[str] | None:
    """Hold a lock file until the result is closed or the process dies; None where another process holds it.

    A POSIX record lock: it is not inherited by child processes, so an orphan cannot keep it. An object store has no
    locks.
    """
    if isinstance(path, Remote):
        return io.StringIO()
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
