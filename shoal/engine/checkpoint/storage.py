"""Access to checkpoint files, on a disk or in an object store (``s3://``, ``gs://``, ``hf://``, ...).

On a disk, written data is durable when the function returns (fsync), and a folder appears under its name atomically
(rename within one file system). An object appears completely or not at all, but an object store has neither folders
nor renames. There, a checkpoint exists if its manifest does, which is written last and deleted first.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TypeGuard

from fsspec import available_protocols
from safetensors import safe_open
from upath import UPath

from shoal.base.errors import UsageError
from shoal.engine.checkpoint.remote_tensors import RemoteTensors

WRITE_BYTES = 16 << 20  # bytes per system call: other threads can run in between, and Linux accepts at most 2 GiB


Place = Path | UPath
"""Path or URL of a checkpoint, or of one of its files."""

Tensors = safe_open | RemoteTensors

COMMITS = "manifest.json"
"""Name of the file that marks a folder in an object store as a complete checkpoint."""


def place(address: str | Path) -> Place:
    """Return the path, or a `UPath` for an address with a protocol, such as ``s3://bucket/run``.

    Raises:
        UsageError: the protocol is unknown, or its package is missing.
    """
    if "://" not in str(address):
        return Path(address)
    try:
        folder = UPath(str(address).rstrip("/"))
        folder.fs  # noqa: B018  # connects
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"checkpoint.folder = '{address}': {error}.\n  Install the fsspec package for "
            f"{str(address).split('://')[0]}://, or use one of {', '.join(sorted(available_protocols()))}."
        ) from None
    return folder


def renames(folder: Place) -> TypeGuard[Path]:
    """Return whether folders there are renamed atomically."""
    return isinstance(folder, Path)


def make_folder(path: Place) -> None:
    """Create a folder and its parents; an existing folder is unchanged."""
    path.mkdir(parents=True, exist_ok=True)


def names(folder: Place) -> list[str]:
    """Return the sorted entries of a folder; empty if the folder does not exist."""
    if isinstance(folder, Path):
        return sorted(os.listdir(folder)) if folder.is_dir() else []
    folder.fs.invalidate_cache()
    try:
        paths = [path.strip("/") for path in folder.fs.ls(folder.path, detail=False)]
    except FileNotFoundError:
        return []
    # An object store may list an empty object for the folder itself.
    return sorted(path.rpartition("/")[2] for path in paths if path != folder.path.strip("/"))


def exists(path: Place) -> bool:
    """Return whether a file or folder exists."""
    if isinstance(path, UPath):
        path.fs.invalidate_cache()
        return path.exists()
    return os.path.lexists(path)


def is_own(path: Place) -> bool:
    """Return whether a file lies in its folder: not a link to elsewhere, a pipe or a device.

    Raises:
        OSError: it does not exist, or is a link to itself.
    """
    if isinstance(path, UPath):
        return size(path) >= 0
    regular = stat.S_ISREG(path.stat().st_mode)
    return regular and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def size(path: Place) -> int:
    """Return the size of a file in bytes."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise _missing(path) from None


def read(path: Place, count: int = -1) -> bytes:
    """Read the first ``count`` bytes of a file, or all."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Place) -> FileNotFoundError:
    """Return the error of a missing file on a disk; object stores raise errors with other messages."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def open_tensors(path: Place) -> Tensors:
    """Open a safetensors file, of which only the used pages or bytes are read."""
    return RemoteTensors(path) if isinstance(path, UPath) else safe_open(path, framework="pt", device="cpu")


def write(path: Place, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file from parts, in order, and make it durable.

    Raises:
        FileExistsError: the file exists (on a disk).
    """
    if isinstance(path, UPath):
        with path.open("wb") as remote:
            for part in parts:
                remote.write(part)
        return
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view[:WRITE_BYTES]):]
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the entries of a folder on a disk durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Place, new: Place) -> None:
    """Rename a folder within its parent: atomically on a disk; in an object store, at least one of the two has its
    manifest at any time.

    Raises:
        OSError: ``new`` exists and is not an empty folder.
    """
    if isinstance(old, Path):
        os.rename(old, str(new))
        sync_folder(old.parent)
        return
    assert isinstance(new, UPath)  # in the same store
    make_folder(new)
    for name in sorted(names(old), key=lambda name: name == COMMITS):
        old.fs.copy((old / name).path, (new / name).path)  # inside the store, where it can
    remove(old)


def remove(path: Place) -> None:
    """Delete a folder and its content, if it exists."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    if exists(path / COMMITS):
        (path / COMMITS).unlink()
    if exists(path):
        path.fs.rm(path.path, recursive=True)


def lock(path: Place) -> IO[str] | None:
    """Hold a lock file until the result is closed or the process ends; None if another process holds it.

    Uses a POSIX record lock, which child processes do not inherit, so that an orphan cannot keep it. An object store
    has no locks.
    """
    if isinstance(path, UPath):
        return io.StringIO()
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
