"""A folder in an object store, or in whatever else fsspec has an address for: ``s3://bucket/run``, ``gs://``, ``hf://``.

An object appears whole or not at all, but there are neither folders nor renames: what makes a checkpoint of some
objects is that its manifest is there, which is written last and deleted first.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.base.errors import UsageError
from shoal.engine.checkpoint.dtypes import DTYPES

MOST_HEADER = 100 << 20  # bytes: the limit of the safetensors format


@dataclass(frozen=True)
class Remote:
    """An address, used like a `pathlib.Path`.

    Attributes:
        url: with its protocol.
    """

    url: str
    _files: Any = field(repr=False, compare=False)
    _path: str = field(repr=False, compare=False)

    @staticmethod
    def of(url: str) -> Remote:
        """The address of a URL.

        Raises:
            UsageError: nothing is known of its protocol, or its package is missing.
        """
        import fsspec

        try:
            files, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            protocol = url.split("://")[0]
            raise UsageError(
                f"checkpoint.folder = '{url}': {error}.\n  Install what fsspec needs for {protocol}://, or use "
                f"one of {', '.join(sorted(fsspec.available_protocols()))}."
            ) from None
        return Remote(url.rstrip("/"), files, path.rstrip("/"))

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}", self._files, f"{self._path}/{name}")

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: Remote) -> bool:
        return self.url < other.url

    @property
    def name(self) -> str:
        """Its last part."""
        return self.url.rpartition("/")[2]

    def with_name(self, name: str) -> Remote:
        """Another in the same place."""
        return Remote(f"{self.url.rpartition('/')[0]}/{name}", self._files, f"{self._path.rpartition('/')[0]}/{name}")

    # ---- what storage does with it -----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """What lies in it, sorted."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        inside = {path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != self._path.strip("/")}
        return sorted(inside - {""})

    def exists(self) -> bool:
        """Whether there is anything of this name."""
        self._files.invalidate_cache()
        return self._files.exists(self._path)

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self._files.isfile(self._path)

    def size(self) -> int:
        """Bytes in an object."""
        try:
            return self._files.size(self._path)
        except FileNotFoundError:
            raise self._missing() from None

    def read(self, count: int = -1, start: int = 0) -> bytes:
        """``count`` bytes of an object from ``start`` on, or all."""
        try:
            return self._files.cat_file(self._path, start=start, end=None if count < 0 else start + count)
        except FileNotFoundError:
            raise self._missing() from None

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Make an object, which is there when this returns."""
        with self._files.open(self._path, "wb") as file:
            for part in parts:
                file.write(part)

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def make(self) -> None:
        """Make a folder, where the store knows such a thing."""
        self._files.makedirs(self._path, exist_ok=True)

    def move(self, to: Remote, last: str) -> None:
        """Copy all that lies in it, then delete it: at any moment one of both has ``last``, and then it is whole.

        Args:
            last: is copied last and deleted first.
        """
        to.make()
        for name in sorted(self.names(), key=lambda name: name == last):
            self._files.copy((self / name)._path, (to / name)._path)
        self.delete(last)

    def delete(self, first: str) -> None:
        """Delete all that lies in it, beginning with ``first``."""
        if (self / first).exists():
            self._files.rm_file((self / first)._path)
        if self.exists():
            self._files.rm(self._path, recursive=True)


class RemoteTensors:
    """A safetensors object of which only those bytes are read that are asked for; a context manager, like `safe_open`.

    Raises:
        SafetensorError: it is not one.
    """

    def __init__(self, path: Remote):
        self._path = path
        size = int.from_bytes(path.read(8), "little")
        if size > MOST_HEADER:
            raise SafetensorError(f"its header would take {size} bytes")
        try:
            self._entries = json.loads(path.read(size, start=8))
        except ValueError as error:
            raise SafetensorError(f"its header is no JSON: {error}") from None
        self._start = 8 + size

    def __enter__(self) -> RemoteTensors:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own.

        Raises:
            SafetensorError: there is none of this name, or it is not of the shape and dtype that the header says.
        """
        try:
            entry = self._entries[name]
            first, stop = entry["data_offsets"]
            data = bytearray(self._path.read(stop - first, start=self._start + first))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SafetensorError(f"tensor '{name}': {type(error).__name__}: {error}") from None
