"""A run's directory in the memory of one host: a tmpfs, which outlives the ranks that write to it.

    /dev/shm/shoal-1000-5f0c2a91b1d7e3c4/      one per user and run folder, private (0700)
      owner.json                               process whose lifetime the run shares
      node-00000/                              one per node that this host is or simulates
        5f0c2a91-00003-1/                      a slot: attempt, rank, slot index
          rank-00003.safetensors
          part.json                            written last: a slot without it is empty

It is removed when the run ends normally; after a failure the next `--resume` on the same host uses it. A starting run
removes the directories of runs whose owners are dead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

from shoal.base.errors import UsageError
from shoal.base.files import try_to_write
from shoal.base.units import show_bytes
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.owned_folders import claim, find_orphans, is_private

PART = "part.json"


def run_dir(run_folder: Path, config: FailoverConfig) -> Path:
    """Return the directory of a run in the memory of this host."""
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return config.memory_folder / f"{_prefix()}{name}"


def check_run_dir(path: Path, needed: int | None) -> None:
    """Reject host memory without ``needed`` bytes for a run's state, before anything is created.

    Args:
        needed: None for a run that resumes: its states may fill the memory, and it can continue without.

    Raises:
        UsageError: the file system is missing, not writable or too small, or the directory belongs to another user.
    """
    _check_folder(path)
    if needed is None:
        return
    try:
        try_to_write(path.parent)
    except OSError as error:
        raise _unusable(path, error) from None
    check_free_memory(path, needed)


def make_run_dir(path: Path) -> None:
    """Create a run's directory or reuse the one of an earlier attempt.

    Raises:
        UsageError: see `check_run_dir`; the free space is not checked.
    """
    _check_folder(path)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from None
    _check_folder(path)


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(
            f"failover.memory_folder = '{path.parent}' does not exist.\n  Name a folder in memory (a tmpfs), or set "
            "failover.memory_every = 0."
        )
    if os.path.lexists(path) and not is_private(path):
        raise UsageError(f"{path} is not a private folder of this user, so shoal does not use it.\n  Remove it.")


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"failover.memory_folder = '{path.parent}' cannot be written: {error.strerror}.\n  Free space, name another "
        "folder in memory (a tmpfs), or set failover.memory_every = 0."
    )


def claim_run_dir(path: Path, run_folder: Path) -> None:
    """Record the process whose lifetime the run shares: the supervisor that restarts this rank, or the parent."""
    try:
        claim(path, run_folder, int(os.environ.get("SHOAL_OWNER") or os.getppid()))
    except OSError as error:
        raise _unusable(path, error) from None


def release(path: Path) -> None:
    """Remove the directory and free its memory."""
    shutil.rmtree(path, ignore_errors=True)


def remove_orphans(path: Path) -> Iterator[str]:
    """Remove directories of this user's other runs whose owners are dead; yield a line for each."""
    for other, run in _orphans(path):
        release(other)
        yield f"removed the states that {run} left in {other}: its owner is dead"


def _orphans(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield (directory, run) of other runs whose owners are known to be dead."""
    return (found for found in find_orphans(path.parent, _prefix()) if found[0] != path)


def check_free_memory(path: Path, needed: int) -> None:
    """Require enough memory on this host, counting what this run and orphans occupy as free."""
    reusable = sum(_bytes_in(folder) for folder in (path, *(other for other, _ in _orphans(path))))
    system = os.statvfs(path.parent)
    free = min(system.f_bavail * system.f_frsize, psutil.virtual_memory().available) + reusable
    if needed > free:
        raise UsageError(
            f"failover.memory_every: two copies of this node's state and two of its neighbour's need "
            f"{show_bytes(needed)} in {path.parent} of {socket.gethostname()}, which has {show_bytes(free)} free."
            "\n  Enlarge that file system (in a container, by --shm-size), name another by failover.memory_folder, "
            "use more nodes, or set failover.memory_every = 0."
        )


def _bytes_in(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run may be removing orphans too
            found = file.lstat()
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return size


def _prefix() -> str:
    return f"shoal-{os.getuid()}-"
