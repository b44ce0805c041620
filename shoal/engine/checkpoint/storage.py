"""Access to checkpoint files, on a disk or in an object store (``s3://``, ``gs://``, ``hf://``, ...).

On a disk, written data is durable when the function returns (fsync), and a folder appears under its name atomically
(rename within one file system). An object appears completely or not at all, but an object store has neither folders
nor renames. There, a checkpoint exists if its manifest does, which is written last and deleted first.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from upath import UPath

from shoal.base.addresses import AnyPath
from shoal.base.files import open_to_append, open_to_read

WRITE_BYTES = 16 << 20  # bytes per system call: other threads can run in between, and Linux accepts at most 2 GiB
PATIENCE_SECONDS = 5.0

COMMITS = "manifest.json"
"""Name of the file that marks a folder in an object store as a complete checkpoint."""


def list_names(folder: AnyPath) -> list[str]:
    """Return the sorted entries of a folder; empty if the folder does not exist."""
    try:
        if isinstance(folder, Path):
            return sorted(os.listdir(folder))
        folder.fs.invalidate_cache()
        paths = [path.strip("/") for path in folder.fs.ls(folder.path, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    # An object store may list an empty object for the folder itself.
    return sorted(path.rpartition("/")[2] for path in paths if path != folder.path.strip("/"))


def exists(path: AnyPath) -> bool:
    """Return False only if there is certainly no such file: a disk or a store that does not answer may well have it."""
    try:
        if isinstance(path, UPath):
            path.fs.invalidate_cache()
            path.fs.info(path.path)
        else:
            path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except Exception:  # each object-store library has its own exceptions
        return True
    return True


def is_inside_folder(path: AnyPath) -> bool:
    """Return whether a file lies in its folder: not a link to elsewhere, a pipe or a device.

    Raises:
        OSError: it does not exist, or is a link to itself.
    """
    if isinstance(path, UPath):
        return size(path) >= 0
    regular = stat.S_ISREG(path.stat().st_mode)
    return regular and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def size(path: AnyPath) -> int:
    """Return the size of a file in bytes."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise _missing(path) from None


def read(path: AnyPath, count: int) -> bytes:
    """Read the first ``count`` bytes of a file, or all if it is shorter."""
    try:
        with path.open("rb") if isinstance(path, UPath) else open_to_read(path) as file:
            return file.read(count)
    except FileNotFoundError:
        raise _missing(path) from None


def open_ranges(path: AnyPath) -> Callable[[int, int], bytearray | memoryview]:
    """Return a function that reads bytes ``start:stop`` of a file; on a disk, the file is mapped, not copied."""
    if isinstance(path, UPath):
        return lambda start, stop: bytearray(path.fs.cat_file(path.path, start=start, end=stop))
    with open_to_read(path) as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return lambda start, stop: mapped[start:stop]


def _missing(path: AnyPath) -> FileNotFoundError:
    """Return the error of a missing file on a disk; object stores raise errors with other messages."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def write(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file from parts, in order, and make it durable; in place of what a failed save may have left."""
    if isinstance(path, UPath):
        with path.open("wb") as remote:
            for part in parts:
                remote.write(part)
        return
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view[:WRITE_BYTES]):]
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make the entries of a folder on a disk durable, or the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: AnyPath, new: AnyPath) -> None:
    """Rename a folder within its parent: atomically on a disk; in an object store, at least one of the two has its
    manifest at any time.

    Raises:
        OSError: ``new`` exists and is not an empty folder.
    """
    if isinstance(old, Path):
        os.rename(old, str(new))
        sync(old.parent)
        return
    assert isinstance(new, UPath)  # in the same store
    new.mkdir(parents=True, exist_ok=True)
    for name in sorted(list_names(old), key=lambda name: name == COMMITS):
        old.fs.copy((old / name).path, (new / name).path)  # inside the store, where it can
    remove(old)


def remove(path: AnyPath) -> None:
    """Delete a folder and its content, if it exists."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    if exists(path / COMMITS):
        (path / COMMITS).unlink()
    if exists(path):
        path.fs.rm(path.path, recursive=True)


def lock(path: AnyPath) -> IO[Any] | None:
    """Hold a lock file until the result is closed or the process ends; None if another process still holds it after
    `PATIENCE_SECONDS`: a process that was killed keeps its locks until its last thread has ended.

    Uses a POSIX record lock, which child processes do not inherit, so that an orphan cannot keep it. An object store
    and some network file systems have no locks: there, nothing is held.
    """
    if isinstance(path, UPath):
        return io.StringIO()
    file, until = open_to_append(path), time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                return None
            time.sleep(0.02)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                raise
            return file
