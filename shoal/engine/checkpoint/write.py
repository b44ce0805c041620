"""Write one rank's part of a checkpoint: copy its primary pieces to CPU memory, then write a safetensors file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.base.boxes import Box, Piece, flat_range
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.dtypes import DTYPE_NAMES
from shoal.engine.checkpoint.manifest import (
    CheckpointError,
    RankPart,
    StoredBox,
    StoredFile,
    StoredTensor,
    checksum,
    key,
)
from shoal.engine.checkpoint.storage import Place

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
class Staged:
    """One rank's part of a state at one moment, independent of the tensors that it was copied from.

    Attributes:
        data: data section of the file, ``uint8``.
        slots: ranges of the boxes in ``data``, without gaps.
        tensors: global shape and dtype of every tensor of which the rank holds a piece, primary or not.
        names: all names in the state.
    """

    data: torch.Tensor
    slots: list[FileSlot]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    names: list[str]


@dataclass(frozen=True)
class SavePlan:
    """The boxes of a state that this rank saves, and their ranges in the file.

    Attributes:
        primary: the tensors to copy from, each with its box, in the order of ``slots``.
        size: bytes of the data section.
    """

    primary: list[tuple[FileSlot, torch.Tensor]]
    size: int
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    names: list[str]

    @property
    def slots(self) -> list[FileSlot]:
        """Ranges of the boxes in the data section."""
        return [slot for slot, _ in self.primary]

    @torch.no_grad()
    def copy(self, data: torch.Tensor) -> Staged:
        """Copy all boxes into ``data``, uint8 [size]. The result is valid until that memory is overwritten."""
        for slot, values in self.primary:
            data[slot.start : slot.stop].view(slot.dtype).view(slot.box.shape).copy_(values)
        return Staged(data, self.slots, self.tensors, self.names)


def lay_out(state: State, box_bytes: int = BOX_BYTES) -> SavePlan:
    """Assign a range of the file to each primary box; nothing is copied yet.

    Raises:
        CheckpointError: a piece whose tensor does not have its box's shape, or has a dtype that the format lacks.
    """
    pieces: list[tuple[str, Piece]] = []
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, held in state.items():
        for piece in held:
            _check(name, piece)
            tensors[name] = (tuple(piece.whole), piece.tensor.dtype)
            if piece.primary and piece.box.numel:
                pieces.append((name, piece))
    pieces.sort(key=lambda item: -item[1].tensor.element_size())  # widest first, so that all are aligned
    primary, start = [], 0
    for name, piece in pieces:
        width = piece.tensor.element_size()
        for box in cut(piece.box, box_bytes // width):
            stop = start + box.numel * width
            slot = FileSlot(name, box, piece.tensor.dtype, start, stop)
            primary.append((slot, piece.tensor.detach()[box.inside(piece.box).slices]))
            start = stop
    return SavePlan(primary, start, tensors, list(state))


class Staging:
    """Reusable CPU memory for one rank's primary pieces."""

    def __init__(self, box_bytes: int = BOX_BYTES) -> None:
        self._box_bytes = box_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, state: State) -> Staged:
        """Copy the pieces that this rank must save. The result is valid until the next copy.

        Raises:
            CheckpointError: see `lay_out`.
        """
        plan = lay_out(state, self._box_bytes)
        if self._memory.numel() < plan.size:
            self._memory = torch.empty(plan.size, dtype=torch.uint8)
        return plan.copy(self._memory[: plan.size])


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, at row boundaries where a row fits."""
    row = math.prod(box.shape[1:])
    step = max(1, most // row * row or most)
    for start in range(0, box.numel, step):
        for _, part in flat_range(box.shape, start, min(start + step, box.numel)):
            yield part.within(box)


def write_part(folder: Place, rank: int, staged: Staged) -> RankPart:
    """Write one rank's file into a staging folder, and return its description. Only staged data is used.

    The safetensors format is a length (8 bytes, little endian), a JSON header and the data. The staged memory already
    has the format of the data, so it is written without another copy, while other threads run.
    """
    header = header_of(staged.slots)
    if staged.slots:
        storage.write(folder / file_name(rank), [header, staged.data.numpy().data])
    return part_of(rank, header, staged)


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def part_of(rank: int, header: bytes, staged: Staged) -> RankPart:
    """Describe one rank's file: every box with its checksum. A rank without primary pieces has no file."""
    tensors = {
        name: StoredTensor(shape=shape, dtype=DTYPE_NAMES[dtype], boxes=[])
        for name, (shape, dtype) in staged.tensors.items()
    }
    if not staged.slots:
        return RankPart(files={}, tensors=tensors, names=staged.names)
    name, data = file_name(rank), staged.data.numpy().data
    for slot in staged.slots:
        tensors[slot.name].boxes.append(
            StoredBox(
                file=name,
                offset=slot.box.offset,
                shape=slot.box.shape,
                checksum=checksum(data[slot.start : slot.stop]),
            )
        )
    file = StoredFile(bytes=len(header) + len(data), header_bytes=len(header), header=checksum(header))
    return RankPart(files={name: file}, tensors=tensors, names=staged.names)


def header_of(slots: list[FileSlot]) -> bytes:
    """Build the start of a safetensors file with these slots: the length and the JSON header."""
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
