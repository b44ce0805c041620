"""One rank's state of one step in a node's memory: a mapped file, and a description that is written last."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.engine.checkpoint.load import check_part
from shoal.engine.checkpoint.manifest import CheckpointError, RankPart
from shoal.engine.checkpoint.write import file_name
from shoal.training.resilience.host_memory_dir import PART, is_private

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux: all pages at once, not one by one as they are first written


class SlotRecord(BaseModel):
    """What a slot holds."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    attempt: str
    """Of the run: parts of different attempts, whose layouts may differ, are never mixed."""

    step: int
    rank: int
    world_size: int
    extra: dict[str, Any]
    part: RankPart

    @property
    def save(self) -> tuple[int, str]:
        """What the parts of one save have in common; later ones are larger."""
        return self.step, self.attempt


class MemorySlot:
    """A rank's own slot, or one for its neighbour's copy: memory that is written again and again.

    Args:
        folder: of the slot; its parents are there.
        rank: whose state it is.
    """

    def __init__(self, folder: Path, rank: int):
        self.folder, self.file = folder, folder / file_name(rank)
        self._memory: torch.Tensor | None = None

    def room(self, size: int) -> torch.Tensor:
        """Memory to write a file of ``size`` bytes into, uint8 [size]; from now on the slot counts as empty.

        Raises:
            OSError: the memory cannot be had.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / PART).unlink(missing_ok=True)
        self.reserve(size)
        return self.written()

    def reserve(self, size: int) -> None:
        """Have that memory already: getting it takes longer than writing it.

        Raises:
            OSError: the memory cannot be had.
        """
        if self._memory is None or self._memory.numel() != size:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._memory = _mapped(self.file, size)

    def written(self) -> torch.Tensor:
        """What `room` gave last."""
        assert self._memory is not None, "room() comes first"
        return self._memory

    def commit(self, part: bytes) -> None:
        """The memory is written: describe it, whole or not at all."""
        partial = self.folder / f"{PART}.partial"
        partial.write_bytes(part)
        partial.rename(self.folder / PART)


def _mapped(path: Path, size: int) -> torch.Tensor:
    path.unlink(missing_ok=True)
    if size == 0:  # a rank that is primary for nothing
        return torch.empty(0, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a full file system is an error here, and a bus error later
        return torch.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | _POPULATE), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def encode(record: SlotRecord) -> bytes:
    """A description with its own checksum."""
    text = record.model_dump_json().encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def read(folder: Path) -> SlotRecord:
    """The description of a slot, proved undamaged.

    Raises:
        CheckpointError: it is not what was written.
    """
    digest, _, text = (folder / PART).read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise CheckpointError(f"{folder / PART} is damaged.")
    try:
        return SlotRecord.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{folder / PART} is not of this format: {error.errors()[0]['msg']}.") from None


def list_slots(home: Path) -> list[Path]:
    """The slots of all nodes on this host that were written to their end."""
    return sorted(path.parent for path in home.glob(f"node-*/*/{PART}")) if is_private(home) else []


def read_all(folders: list[Path]) -> tuple[list[tuple[SlotRecord, Path]], list[CheckpointError]]:
    """Read slots and verify every byte of them: those that are undamaged, and what is wrong with the others. One that
    vanishes meanwhile is in neither list."""
    whole, damaged = [], []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            try:
                record = read(folder)
                check_part(folder, record.part)
                whole.append((record, folder))
            except CheckpointError as error:
                damaged.append(error)
    return whole, damaged


def newest_step(home: Path) -> int | None:
    """The newest step of which this host's memory holds something."""
    steps = []
    for folder in list_slots(home):
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            steps.append(read(folder).step)
    return max(steps, default=None)


def drop(home: Path, attempt: str, keep: tuple[int, str] | None = None) -> None:
    """Remove what attempts before this one left, whole or torn, but for one save (step, attempt)."""
    for folder in home.glob("node-*/*"):
        if folder.name.startswith(f"{attempt}-"):
            continue
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            if read(folder).save == keep:
                continue
        shutil.rmtree(folder, ignore_errors=True)


def forget(home: Path, after: int) -> None:
    """Empty the slots of later steps; what is mapped stays, to be written again."""
    for folder in list_slots(home):
        if read(folder).step > after:
            (folder / PART).unlink()
