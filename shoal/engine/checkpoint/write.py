"""One rank's part of a checkpoint: its primary pieces, copied to CPU memory, then written as a safetensors file."""

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
"""Global tensor name -> the pieces of it that this rank holds; the names are the same on every layout."""

BOX_BYTES = 64 << 20
"""Larger boxes are cut: a checksum covers a whole box, so this bounds what is read to load a small part of it."""


@dataclass(frozen=True)
class FileSlot:
    """Where one box lies in the data section of the file, in bytes."""

    name: str
    box: Box
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Staged:
    """One rank's part of a state at one moment, independent of the tensors that it was copied from.

    Attributes:
        data: the data section of the file to come, ``uint8``.
        slots: what lies where in ``data``, without gaps.
        tensors: whole shape and dtype of every tensor of which the rank holds a piece, primary or not.
        names: all names of the state.
    """

    data: torch.Tensor
    slots: list[FileSlot]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    names: list[str]


@dataclass(frozen=True)
class SavePlan:
    """What of a state this rank saves, and where each box will lie.

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
        """What lies where."""
        return [slot for slot, _ in self.primary]

    @torch.no_grad()
    def copy(self, data: torch.Tensor) -> Staged:
        """Copy all into ``data``, uint8 [size]. The result is valid until that memory is written again."""
        for slot, values in self.primary:
            data[slot.start : slot.stop].view(slot.dtype).view(slot.box.shape).copy_(values)
        return Staged(data, self.slots, self.tensors, self.names)


def lay_out(state: State, box_bytes: int = BOX_BYTES) -> SavePlan:
    """Decide where in a file each primary box lies; nothing is copied yet.

    Raises:
        CheckpointError: a piece whose tensor is not of its box's shape, or of a dtype that the format lacks.
    """
    pieces: list[tuple[str, Piece]] = []
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, held in state.items():
        for piece in held:
            _check(name, piece)
            tensors[name] = (tuple(piece.whole), piece.tensor.dtype)
            if piece.primary and piece.box.numel:
                pieces.append((name, piece))
    pieces.sort(key=lambda item: -item[1].tensor.element_size())  # widest first, so that all lie aligned
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
    """CPU memory of one rank's primary pieces, kept from one save to the next."""

    def __init__(self, box_bytes: int = BOX_BYTES) -> None:
        self._box_bytes = box_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, state: State) -> Staged:
        """Copy what this rank must save. The result is valid until the next copy.

        Raises:
            CheckpointError: as `lay_out`.
        """
        plan = lay_out(state, self._box_bytes)
        if self._memory.numel() < plan.size:
            self._memory = torch.empty(plan.size, dtype=torch.uint8)
        return plan.copy(self._memory[: plan.size])


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, by whole rows where a row fits."""
    row = math.prod(box.shape[1:])
    step = max(1, most // row * row or most)
    for start in range(0, box.numel, step):
        for _, part in flat_range(box.shape, start, min(start + step, box.numel)):
            yield part.within(box)


def write_part(folder: Place, rank: int, staged: Staged) -> RankPart:
    """Write one rank's file into a staging folder, and say what it holds. Uses only what was staged.

    The safetensors format is a length (8 bytes, little endian), a JSON header and the data; as the staged memory is
    the data already, it goes to the disk without another copy, and other threads run meanwhile.
    """
    header = header_of(staged.slots)
    if staged.slots:
        storage.write(folder / file_name(rank), [header, staged.data.numpy().data])
    return part_of(rank, header, staged)


def file_name(rank: int) -> str:
    """Of one rank's file."""
    return f"rank-{rank:05d}.safetensors"


def part_of(rank: int, header: bytes, staged: Staged) -> RankPart:
    """What one rank's file holds: every box with its checksum. A rank that is primary for nothing has no file."""
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
    """The length and the JSON header that a safetensors file of these slots begins with."""
    entries = {
        key(slot.name, slot.box): {
            "dtype": DTYPE_NAMES[slot.dtype],
            "shape": slot.box.shape,
            "data_offsets": (slot.start, slot.stop),
        }
        for slot in slots
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins aligned
    return len(text).to_bytes(8, "little") + text


def _check(name: str, piece: Piece) -> None:
    if tuple(piece.tensor.shape) != tuple(piece.box.shape):
        raise CheckpointError(
            f"tensor '{name}': a piece of shape {tuple(piece.tensor.shape)} is given for the box {key('', piece.box)}."
        )
    if piece.tensor.dtype not in DTYPE_NAMES:
        allowed = ", ".join(DTYPE_NAMES.values())
        raise CheckpointError(f"tensor '{name}' is {piece.tensor.dtype}; a checkpoint can hold {allowed}.")
