"""Rendezvous store of processes on one host: a folder with a file for each key.

torch's FileStore sleeps 10 ms between two looks for a key, several times for each new group; its TCPStore lets any
process of the host connect.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from hashlib import sha256
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05  # seconds between two looks for a key, a twentieth of the wait

_newest: FolderStore | None = None  # torch itself keeps no Python object of a store


def open_store(folder: Path, world_size: int, device: torch.device) -> dist.Store:
    """Return the rendezvous store of ranks on this host, in a folder that is made if it does not exist."""
    global _newest
    if device.type == "cpu":
        _newest = FolderStore(folder)
        return _newest
    folder.mkdir(mode=0o700, exist_ok=True)
    return dist.FileStore(str(folder / "keys"), world_size)  # threads of NCCL read the store, also while Python ends


class FolderStore(dist.Store):
    """Store in a folder, which is made if it does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FolderStore(Path(folder) / "store")
    ...     store.set("key", b"value")
    ...     FolderStore(Path(folder) / "store").get("key"), store.add("number", 2), store.add("number", 3)
    (b'value', 2, 5)
    """

    def __init__(self, folder: Path):
        super().__init__()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._serial, self._timeout = folder, count(), dist.default_pg_timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, at once for all readers."""
        written = self._folder / f"written-{os.getpid()}-{next(self._serial)}"
        written.write_bytes(value.encode() if isinstance(value, str) else value)
        written.rename(self._path(key))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set. See `wait`."""
        self.wait([key])
        return self._path(key).read_bytes()

    def check(self, keys: Iterable[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: one is not set within the timeout (default: the store's).
        """
        begin, limit = time.monotonic(), (timeout or self._timeout).total_seconds()
        for key in keys:
            while not self._path(key).exists():
                if (waited := time.monotonic() - begin) > limit:
                    raise dist.DistStoreError(f"no process has set {key} in {self._folder}")
                time.sleep(min(max(SHORTEST_PAUSE, waited / 20), LONGEST_PAUSE))

    def add(self, key: str, number: int) -> int:
        """Add to the number of a key, 0 if it is not set; return the sum."""
        with open(self._folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = number + (int(self._path(key).read_bytes()) if self.check([key]) else 0)
            self.set(key, str(total))
            return total

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        deleted = self.check([key])
        self._path(key).unlink(missing_ok=True)
        return deleted

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()
