"""Access to the files of checkpoints, on a disk or in an object store (``s3://``, ``gs://``, ``hf://``, ...).

On a disk, written data is durable when the function returns (fsync), and a folder appears under its name in one step
(rename within one file system is atomic). An object appears complete or not at all, but an object store has neither
folders nor renames: there, a checkpoint exists once its manifest does, which is written last and deleted first.
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

WRITE_BYTES = 16 << 20  # per system call: other threads run meanwhile, and Linux takes at most 2 GiB


Place = Path | UPath
"""Where a checkpoint is, or a file of one."""

Tensors = safe_open | RemoteTensors

COMMITS = "manifest.json"
"""The file by which a folder in an object store is a checkpoint."""


def place(address: str | Path) -> Place:
    """Return the path, or the address if it has a protocol, as in ``s3://bucket/run``.

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
    """Whether a folder there gets another name in one step."""
    return isinstance(folder, Path)


def make_folder(path: Place) -> None:
    """Create a folder and its parents; one that exists is left as it is."""
    path.mkdir(parents=True, exist_ok=True)


def names(folder: Place) -> list[str]:
    """The entries of a folder, sorted; none where there is no such folder."""
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
    """Whether there is anything of this name."""
    if isinstance(path, UPath):
        path.fs.invalidate_cache()
        return path.exists()
    return os.path.lexists(path)


def is_own(path: Place) -> bool:
    """Whether a file, if it is there, lies in its folder: not a link to elsewhere, a pipe or a device.

    Raises:
        OSError: it is not there, or is a link to itself.
    """
    if isinstance(path, UPath):
        return size(path) >= 0
    regular = stat.S_ISREG(path.stat().st_mode)
    return regular and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def size(path: Place) -> int:
    """Bytes in a file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise _missing(path) from None


def read(path: Place, count: int = -1) -> bytes:
    """The first ``count`` bytes of a file, or all."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Place) -> FileNotFoundError:
    """Return the error that a disk raises, which object stores word in their own ways."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def open_tensors(path: Place) -> Tensors:
    """A safetensors file, of which only the pages or bytes that are used are read."""
    return RemoteTensors(path) if isinstance(path, UPath) else safe_open(path, framework="pt", device="cpu")


def write(path: Place, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, part after part, to the disk.

    Raises:
        FileExistsError: on a disk, nothing is ever written over.
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
    """Delete a folder and all in it, if it is there."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    if exists(path / COMMITS):
        (path / COMMITS).unlink()
    if exists(path):
        path.fs.rm(path.path, recursive=True)


def lock(path: Place) -> IO[str] | None:
    """Hold a lock file until the result is closed or the process dies; None where another process holds it.

    A POSIX record lock: it is not inherited by child processes, so an orphan cannot keep it. An object store has no
    locks.
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
