"""Write one rank's part of a checkpoint: copy its primary pieces to CPU memory, then write a safetensors file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Box, Piece, flat_range
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.manifest import (
    DTYPE_NAMES,
    CheckpointError,
    RankPart,
    StoredBox,
    StoredFile,
    StoredTensor,
    checksum,
    key,
)

State = dict[str, list[Piece]]
"""Pieces that this rank holds, by global tensor name; the names are the same on every layout."""

BOX_BYTES = 64 << 20
"""Maximum bytes of a stored box. A checksum covers a complete box, so this bounds the data to read for a small part."""


@dataclass(frozen=True)
class FileSlot:
    """Range of one box in the data section of the file, in bytes."""

    name: str
    box: Box
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class SavePlan:
    """The boxes of a state that this rank saves, and their ranges in the file.

    Attributes:
        slots: ranges of the boxes in the data section, without gaps.
        sources: the tensor of each slot, a view of the state.
        tensors: global shape and dtype of every tensor of which the rank holds a piece, primary or not.
    """

    slots: list[FileSlot]
    sources: list[torch.Tensor]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    names: list[str]

    @property
    def size(self) -> int:
        """Size of the data section in bytes."""
        return self.slots[-1].stop if self.slots else 0

    @torch.no_grad()
    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Copy all boxes into ``data``, uint8 [size], and return it; queue it from CUDA into page-locked memory."""
        for slot, values in zip(self.slots, self.sources, strict=True):
            place = data[slot.start : slot.stop].view(slot.dtype).view(slot.box.shape)
            place.copy_(values, non_blocking=True)
        return data

    @property
    def device(self) -> torch.device:
        """Return the device of the state; the CPU only if all of it is on the CPU."""
        devices = {values.device for values in self.sources}
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def plan_save(state: State, box_bytes: int = BOX_BYTES) -> SavePlan:
    """Assign a range of the file to each primary box; nothing is copied yet.

    Raises:
        CheckpointError: a piece whose tensor does not have its box's shape, or has a dtype that the format lacks.
    """
    pieces: list[tuple[str, Piece]] = []
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, held in state.items():
        for piece in held:
            _check(name, piece)
            tensors[name] = (tuple(piece.global_shape), piece.tensor.dtype)
            if piece.primary and piece.box.numel:
                pieces.append((name, piece))
    pieces.sort(key=lambda item: -item[1].tensor.element_size())  # widest first, so that all are aligned
    plan, start = SavePlan([], [], tensors, list(state)), 0
    for name, piece in pieces:
        width = piece.tensor.element_size()
        for box in cut(piece.box, box_bytes // width):
            stop = start + box.numel * width
            plan.slots.append(FileSlot(name, box, piece.tensor.dtype, start, stop))
            plan.sources.append(piece.tensor.detach()[box.to_local(piece.box).slices])
            start = stop
    return plan


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, at row boundaries where a row fits."""
    row = math.prod(box.shape[1:])
    step = max(1, most // row * row or most)
    for start in range(0, box.numel, step):
        for _, part in flat_range(box.shape, start, min(start + step, box.numel)):
            yield part.to_global(box)


def write_part(folder: AnyPath, rank: int, plan: SavePlan, data: torch.Tensor) -> RankPart:
    """Write one rank's file into a staging folder, and return its description. Only copied data is used.

    The safetensors format is a length (8 bytes, little endian), a JSON header and the data. The copy already has the
    format of the data, so it is written without another copy, while other threads run.
    """
    header = build_header(plan.slots)
    if plan.slots:
        storage.write(folder / file_name(rank), [header, data.numpy().data])
    return describe_part(rank, header, plan, data)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def describe_part(rank: int, header: bytes, plan: SavePlan, data: torch.Tensor) -> RankPart:
    """Describe one rank's file, given the copied data: every box and its checksum; no file without primary pieces."""
    tensors = {
        name: StoredTensor(shape=shape, dtype=DTYPE_NAMES[dtype], boxes=[])
        for name, (shape, dtype) in plan.tensors.items()
    }
    if not plan.slots:
        return RankPart(files={}, tensors=tensors, names=plan.names)
    name, content = file_name(rank), data.numpy().data
    for slot in plan.slots:
        tensors[slot.name].boxes.append(
            StoredBox(
                file=name,
                offset=slot.box.offset,
                shape=slot.box.shape,
                checksum=checksum(content[slot.start : slot.stop]),
            )
        )
    file = StoredFile(bytes=len(header) + len(content), header_bytes=len(header), header=checksum(header))
    return RankPart(files={name: file}, tensors=tensors, names=plan.names)


def build_header(slots: list[FileSlot]) -> bytes:
    """Build the start of a safetensors file, the length and the JSON header; empty without slots."""
    if not slots:
        return b""
    entries = {
        key(slot.name, slot.box): {
            "dtype": DTYPE_NAMES[slot.dtype],
            "shape": slot.box.shape,
            "data_offsets": (slot.start, slot.stop),
        }
        for slot in slots
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def _check(name: str, piece: Piece) -> None:
    if tuple(piece.tensor.shape) != tuple(piece.box.shape):
        raise CheckpointError(
            f"tensor '{name}': a piece of shape {tuple(piece.tensor.shape)} is given for the box {key('', piece.box)}."
        )
    if piece.tensor.dtype not in DTYPE_NAMES:
        allowed = ", ".join(DTYPE_NAMES.values())
        raise CheckpointError(f"tensor '{name}' is {piece.tensor.dtype}; a checkpoint can hold {allowed}.")
