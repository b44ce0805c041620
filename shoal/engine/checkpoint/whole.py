"""Load, verify or describe a complete checkpoint in one process, regardless of the layout that saved it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.checkpoint.load import load, verify
from shoal.engine.checkpoint.manifest import DTYPES, CheckpointError, read_manifest
from shoal.engine.checkpoint.storage import to_path


@dataclass(frozen=True)
class SavedTensor:
    """Description of one tensor of a checkpoint.

    Attributes:
        name: such as ``"model.layers.0.attention.q.weight"``.
        dtype: the name in safetensors, such as ``"F32"``.
        shape: global shape.
        boxes: number of stored pieces.
        files: number of files that hold them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: int
    files: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class CheckpointContents:
    """Summary of a checkpoint.

    Attributes:
        step: number of completed training steps.
        tensors: sorted by name.
        files: number of files.
    """

    step: int
    tensors: tuple[SavedTensor, ...]
    files: int

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.bytes for tensor in self.tensors)


def load_checkpoint(
    path: str | Path, *, prefix: str = "", device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Load the unsharded tensors of a checkpoint onto one device, regardless of the layout that saved them.

    Args:
        path: folder of one checkpoint, or its URL, such as ``"s3://bucket/run/step-00000100"``.
        prefix: load only tensors whose names start with it: ``"model."`` skips the optimizer states.
        device: device of the tensors.

    Returns:
        Tensors by name, in the dtypes that they were saved in.

    Raises:
        UsageError: it is not a checkpoint, or is damaged, or does not fit in the device's memory.

    >>> import shoal
    >>> weights = shoal.load_checkpoint("runs/example/checkpoints/step-00000002", prefix="model.")
    >>> weights["model.layers.0.attention.q.weight"].shape
    torch.Size([32, 32])
    """
    folder = to_path(path)
    saved = {name: each for name, each in read_manifest(folder).tensors.items() if name.startswith(prefix)}
    try:
        tensors = {
            name: torch.empty(each.shape, dtype=DTYPES[each.dtype], device=device) for name, each in saved.items()
        }
    except (RuntimeError, OverflowError, TypeError) as error:  # too large for the device, or for any device
        raise CheckpointError(f"{path}: there is no room for its tensors on {device}: {error}.") from None
    state = {
        name: [Piece(tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor)] for name, tensor in tensors.items()
    }
    load(folder, state, ignore_prefixes=("",) if prefix else ())
    return tensors


def verify_checkpoint(path: str | Path) -> None:
    """Read a complete checkpoint and compare every byte with its checksums.

    Args:
        path: folder of one checkpoint, or its URL.

    Raises:
        UsageError: it is not a checkpoint, or is damaged; lists every damaged or missing file and tensor.

    >>> import shoal
    >>> shoal.verify_checkpoint("runs/example/checkpoints/step-00000002")
    >>> shoal.verify_checkpoint("runs/example")
    Traceback (most recent call last):
    shoal.engine.checkpoint.manifest.CheckpointError: runs/example is not a complete checkpoint: ...
    """
    verify(to_path(path))


def describe_checkpoint(path: str | Path) -> CheckpointContents:
    """Describe a checkpoint from its manifest, without reading tensors.

    Args:
        path: folder of one checkpoint, or its URL.

    Raises:
        UsageError: it is not a checkpoint, or its manifest is damaged.

    >>> import shoal
    >>> found = shoal.describe_checkpoint("runs/example/checkpoints/step-00000002")
    >>> found.step, found.files, found.tensors[0].name, found.tensors[0].shape
    (2, 1, 'model.embed.token.weight', (257, 32))
    """
    manifest = read_manifest(to_path(path))
    tensors = tuple(
        SavedTensor(name, saved.dtype, saved.shape, len(saved.boxes), len({box.file for box in saved.boxes}))
        for name, saved in manifest.tensors.items()
    )
    return CheckpointContents(manifest.step, tensors, len(manifest.files))
