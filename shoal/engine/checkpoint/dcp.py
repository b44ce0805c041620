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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shoal.base.boxes import Box
from shoal.base.errors import UsageError
from shoal.base.files import open_to_read
from shoal.engine.checkpoint.manifest import DTYPE_NAMES

EMBEDDINGS = ("model.embed_tokens.weight", "wte.weight")  # every model has one; what precedes its name is a prefix
DAMAGE = (OSError, EOFError, RuntimeError, pickle.UnpicklingError, AttributeError, ImportError, TypeError, ValueError,
          LookupError, ArithmeticError, MemoryError)  # what reading arbitrary bytes may raise
SETTINGS = ("lr", "betas", "eps", "weight_decay")  # of a group of parameters of AdamW
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
        return join_path if module.startswith("pathlib") else super().find_class(module, name)


def join_path(*parts: str) -> str:
    """Read a path as text. The writer's system or Python may have path classes that do not exist here, and a pickle may
    set attributes of the classes that it names."""
    return "/".join(parts)


class DCPTensor:
    """A stored tensor, of which slices are read; the methods are as in safetensors.

    Args:
        read: reads a stored chunk of it by the offset.
        where: its file and name, for errors.
    """

    def __init__(self, stored: TensorStorageMetadata, read: Callable[[torch.Size], Tensor], where: str):
        self._stored, self._read, self._where = stored, read, where

    def get_dtype(self) -> str:
        """Return the number format as safetensors names it."""
        dtype = self._stored.properties.dtype
        return DTYPE_NAMES.get(dtype, str(dtype))

    def get_shape(self) -> list[int]:
        return list(self._stored.size)

    def __getitem__(self, slices: Sequence[slice]) -> Tensor:
        wanted = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
        values, missing = torch.empty(wanted.shape, dtype=self._stored.properties.dtype), wanted.numel
        for chunk in self._stored.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if common := wanted.intersect(box):
                stored = self._read(chunk.offsets)[common.to_local(box).slices]
                values[common.to_local(wanted).slices] = stored
                missing -= common.numel  # stored chunks do not overlap
        if missing:
            raise UsageError(f"{self._where}: {missing:,} of its elements are in no file.")
        return values


class DCPContent(NamedTuple):
    """What a checkpoint has of a model.

    Attributes:
        weights: by name, without a common prefix such as "model.".
        states: of the optimizer, by the name of the weight and "exp_avg", "exp_avg_sq" or "step".
        settings: of the optimizer: learning rate, betas, eps and weight decay (the largest of its groups), as torch
            names them.
    """

    weights: dict[str, DCPTensor]
    states: dict[str, DCPTensor]
    settings: dict[str, Any]


def open_dcp(path: Path) -> DCPContent:
    """Return the tensors of a model.

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
    except DAMAGE as error:
        raise UsageError(f"{path}: it cannot be read: {str(error) or 'it is cut off'}.") from None
    first = min((name for name in stored if name.endswith(EMBEDDINGS)), key=len, default=None)
    if first is None:
        some = ", ".join([*stored][:3]) or "none"
        raise UsageError(f"{path}: no tensor is called {EMBEDDINGS[0]}, as in Hugging Face's format; it has {some}.")
    prefix = first.removesuffix(next(name for name in EMBEDDINGS if first.endswith(name)))

    def read_stored(name: str, offset: torch.Size | None = None) -> Any:
        stored_in = path
        try:
            at = content.storage_data[MetadataIndex(name, offset)]
            stored_in = path.parent / at.relative_path
            if stored_in.parent != path.parent or at.transform_descriptors:
                raise OSError("it is in another folder, or compressed")
            with open_to_read(stored_in) as file:
                file.seek(at.offset)
                data = io.BytesIO(file.read(at.length))
            found = torch.load(data, map_location="cpu", weights_only=True)
            if offset is not None and not isinstance(found, Tensor):
                raise OSError("it is no tensor")
        except DAMAGE as error:
            raise UsageError(f"{stored_in}: tensor '{name}' cannot be read: {str(error) or 'it is cut off'}.") from None
        return found

    read = lru_cache(maxsize=1)(read_stored)  # pieces of one chunk are read in turn
    tensors = {name: DCPTensor(each, partial(read, name), f"{path}: tensor '{name}'") for name, each in stored.items()}
    weights = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    first = min((name for name in stored if name.endswith(tuple(f"{each}.exp_avg" for each in EMBEDDINGS))),
                key=len, default=None)
    if first is None:
        return DCPContent(weights, {}, {})
    first = first.removesuffix(".exp_avg")
    before = first.removesuffix(next(name for name in EMBEDDINGS if first.endswith(name)))
    states = {name.removeprefix(before): each for name, each in tensors.items() if name.startswith(before)}
    groups = f"{before.rpartition('state.')[0]}param_groups."
    found: dict[str, list[Any]] = {}
    for name in content.state_dict_metadata:
        setting = name.rpartition(".")[2]
        if name.startswith(groups) and setting in SETTINGS:
            found.setdefault(setting, []).append(read_stored(name))
    try:
        settings = {name: each[0] if name == "betas" else float(max(each)) for name, each in found.items()}
    except DAMAGE:
        raise UsageError(f"{path}: one of the optimizer's settings ({', '.join(SETTINGS)}) is no number.") from None
    return DCPContent(weights, states, settings)


class _ReadLate(DefaultSavePlanner):
    """Plan of a save whose tensors on the meta device are read when they are written, one layer in memory at a time."""

    def __init__(self, find: Callable[[str], Tensor]):
        super().__init__()
        self._find = find

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor or value of the plan's entry."""
        value = self.state_dict[index.fqn]
        return self._find(index.fqn) if isinstance(value, Tensor) and value.is_meta else value


def save_dcp(folder: Path, state: Mapping[str, Any], find: Callable[[str], Tensor]) -> None:
    """Write a nested state into a folder as a checkpoint of one rank.

    Args:
        state: values by name, in the order in which they are written; tensors on the meta device are read late.
        find: returns such a tensor by name, joined by dots.
    """
    # With CUDA, copying ahead would sort the tensors by size, and each layer would be read many times.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    with warnings.catch_warnings(action="ignore"):  # that there is a single process
        save(dict(state), storage_writer=writer, planner=_ReadLate(find), no_dist=True)
