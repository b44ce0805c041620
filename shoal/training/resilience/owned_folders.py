"""Private folders that belong to a process: the next start finds and removes what killed processes left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from shoal.base.errors import UsageError
from shoal.base.files import read_json, try_to_write, write_atomically

OWNER = "owner.json"
SCRATCH_BYTES = 1 << 20  # free space that a temporary folder needs: heartbeats, stacks and reports of the ranks


def is_private(path: Path) -> bool:
    """Return whether the path is a directory (not a link) that only this user can access; /dev/shm is open to all."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def claim(path: Path, run_folder: Path, pid: int) -> None:
    """Record the process whose lifetime the folder shares.

    Raises:
        OSError: the folder cannot be written.
    """
    owner = {"host": socket.gethostname(), "pid": pid, "started": start_time(pid), "run": str(run_folder)}
    with contextlib.suppress(OSError, ValueError):
        if json.loads((path / OWNER).read_text()) == owner:
            return
    write_atomically(path / OWNER, json.dumps(owner))


def find_orphans(folder: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield the private folders of this prefix whose owners are known to be dead, with their runs."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(UsageError, LookupError, TypeError):  # incomplete, or not a folder of shoal
            owner = read_json(path / OWNER)
            on_this_host = owner["host"] == socket.gethostname()  # False for a container that shares the file system
            if is_private(path) and on_this_host and start_time(owner["pid"]) != owner["started"]:
                yield path, str(owner["run"])


def start_time(pid: int) -> float | None:
    """Return the start time of a process, which detects reused process ids; None if it is dead."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def temporary_folder(run_folder: Path, *others: Path) -> Iterator[Path]:
    """Create a folder of this process and remove it at the end; first remove those that killed processes left.

    Args:
        others: where to create it if the system's temporary folder is full.

    Raises:
        OSError: none of the places can be written.
    """
    prefix = f"shoal-launch-{os.getuid()}-"
    places = (Path(tempfile.gettempdir()), *others)
    for place in places:
        for path, _ in find_orphans(place, prefix):
            shutil.rmtree(path, ignore_errors=True)
        try:
            try_to_write(place, SCRATCH_BYTES)
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            claim(path, run_folder, os.getpid())
            break
        except OSError:
            if place == places[-1]:
                raise
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
