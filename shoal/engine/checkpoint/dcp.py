"""Weights as a checkpoint of torch.distributed.checkpoint (DCP), under the names of Hugging Face's format.

DCP keeps a list of tensors in a pickle. Only the classes of such a list are read from it, and tensors as
``torch.load(weights_only=True)`` does, so that no code of a folder is run.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shoal.base.boxes import Box
from shoal.base.errors import UsageError
from shoal.base.files import open_to_read
from shoal.engine.checkpoint.manifest import DTYPE_NAMES

FIRST = ("model.embed_tokens.weight", "wte.weight")  # parameters that models have; what precedes them is a prefix
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _ListReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of tensors needs")
        return super().find_class(module, name)


class DCPTensor:
    """A stored tensor, of which slices are read; the methods are as in safetensors.

    Args:
        read: reads a stored chunk of it by the offset.
    """

    def __init__(self, stored: TensorStorageMetadata, read: Callable[[torch.Size], Tensor]):
        self._stored, self._read = stored, read

    def get_dtype(self) -> str:
        """Return the number format as safetensors names it."""
        dtype = self._stored.properties.dtype
        return DTYPE_NAMES.get(dtype, str(dtype))

    def get_shape(self) -> list[int]:
        """Return the shape of the unsharded tensor."""
        return list(self._stored.size)

    def __getitem__(self, slices: Sequence[slice]) -> Tensor:
        wanted = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
        values = torch.empty(wanted.shape, dtype=self._stored.properties.dtype)
        for chunk in self._stored.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if common := wanted.intersect(box):
                stored = self._read(chunk.offsets)[common.to_local(box).slices]
                values[common.to_local(wanted).slices] = stored
        return values


def open_dcp(path: Path) -> dict[str, DCPTensor]:
    """Return the tensors of a model by name, without a common prefix such as "model.".

    Args:
        path: the list of tensors, ``.metadata``; their files are in its folder.

    Raises:
        UsageError: the list of tensors cannot be read, or names no model.
    """
    try:
        with open_to_read(path) as file:
            content = _ListReader(file).load()
        if not isinstance(content, Metadata):
            raise pickle.UnpicklingError("it is another object")
        stored = {n: each for n, each in content.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise UsageError(f"{path}: it cannot be read: {str(error) or 'it is cut off'}.") from None
    first = min((name for name in stored if name.endswith(FIRST)), key=len, default=None)
    if first is None:
        some = ", ".join([*stored][:3]) or "none"
        raise UsageError(f"{path}: no tensor is called {FIRST[0]}, as in Hugging Face's format; it has {some}.")
    prefix = first.removesuffix(next(name for name in FIRST if first.endswith(name)))

    @lru_cache(maxsize=1)  # pieces of one chunk are read in turn
    def read(name: str, offset: torch.Size) -> Tensor:
        at = content.storage_data[MetadataIndex(name, offset)]
        stored_in = path.parent / at.relative_path
        try:
            if stored_in.parent != path.parent or at.transform_descriptors:
                raise OSError("it is in another folder, or compressed")
            with open_to_read(stored_in) as file:
                file.seek(at.offset)
                data = io.BytesIO(file.read(at.length))
            found: Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise UsageError(f"{stored_in}: tensor '{name}' cannot be read: {str(error) or 'it is cut off'}.") from None
        return found

    return {
        name.removeprefix(prefix): DCPTensor(each, partial(read, name))
        for name, each in stored.items() if name.startswith(prefix)
    }


class _ReadLate(DefaultSavePlanner):
    """Plan of a save whose tensors are read when they are written, one layer in memory at a time."""

    def __init__(self, find: Callable[[str], Tensor]):
        super().__init__()
        self._find = find

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of the plan's entry."""
        return self._find(index.fqn)


def save_dcp(folder: Path, empty: Mapping[str, Tensor], find: Callable[[str], Tensor]) -> None:
    """Write tensors into a folder as a checkpoint of one rank.

    Args:
        empty: the tensors by name, on the meta device, in the order in which they are written.
        find: returns a tensor by name.
    """
    with warnings.catch_warnings(action="ignore"):  # that there is a single process
        save(dict(empty), storage_writer=FileSystemWriter(folder), planner=_ReadLate(find), no_dist=True)
