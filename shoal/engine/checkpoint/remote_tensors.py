"""Partial reads of safetensors objects in an object store."""

from __future__ import annotations

import json

import torch
from safetensors import SafetensorError
from upath import UPath

from shoal.engine.checkpoint.dtypes import DTYPES

MOST_HEADER = 100 << 20  # bytes: the limit of the safetensors format


class RemoteTensors:
    """A safetensors object of which only the requested bytes are read; a context manager, like `safe_open`.

    Raises:
        SafetensorError: the object is not in the safetensors format.
    """

    def __init__(self, path: UPath):
        self._path = path
        size = int.from_bytes(self._read(0, 8), "little")
        if size > MOST_HEADER:
            raise SafetensorError(f"its header would take {size} bytes")
        try:
            self._entries = json.loads(self._read(8, size))
        except ValueError as error:
            raise SafetensorError(f"its header is no JSON: {error}") from None
        self._start = 8 + size

    def __enter__(self) -> RemoteTensors:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing; no resource is held."""

    def _read(self, start: int, count: int) -> bytes:
        return self._path.fs.cat_file(self._path.path, start=start, end=start + count)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor into new memory.

        Raises:
            SafetensorError: no such tensor, or its size does not match the shape and dtype in the header.
        """
        try:
            entry = self._entries[name]
            first, stop = entry["data_offsets"]
            data = bytearray(self._read(self._start + first, stop - first))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SafetensorError(f"tensor '{name}': {type(error).__name__}: {error}") from None
