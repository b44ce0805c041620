"""Memory slot: one rank's state of one step in a node's memory, as a mapped file and a description written last."""

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

from shoal.engine.checkpoint.manifest import CheckpointError, RankPart
from shoal.engine.checkpoint.write import file_name
from shoal.engine.streams import lock_pages
from shoal.training.resilience.host_memory_dir import PART
from shoal.training.resilience.owned_folders import is_private

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux: map all pages now, not on first write


class SlotRecord(BaseModel):
    """Description of a slot's content."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    attempt: str
    """Attempt of the run. Parts of different attempts are never mixed, as their layouts may differ."""

    step: int
    rank: int
    world_size: int
    extra: dict[str, Any]
    part: RankPart

    @property
    def save(self) -> tuple[int, str]:
        """Key shared by the parts of one save; larger for later saves."""
        return self.step, self.attempt


class MemorySlot:
    """Reusable memory for the state of ``rank``: a rank's own, on ``device``, or its neighbour's copy."""

    def __init__(self, folder: Path, rank: int, device: torch.device):
        self.device, self.folder, self.file = device, folder, folder / file_name(rank)
        self.memory = torch.empty(0, dtype=torch.uint8)

    def open(self, size: int) -> torch.Tensor:
        """Mark the slot as empty and return its memory for a file of ``size`` bytes, uint8 [size].

        The first call takes longer than writing: it allocates the memory, and page-locks it for a CUDA device.

        Raises:
            OSError: the memory cannot be allocated.
        """
        self.clear()
        if self.memory.numel() != size or not self.file.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.memory = _map_file(self.file, size)
            lock_pages(self.memory, self.device, "checkpoints in host memory")
        return self.memory

    def clear(self) -> None:
        """Mark the slot as empty; its memory stays."""
        (self.folder / PART).unlink(missing_ok=True)

    @property
    def save(self) -> tuple[int, str] | None:
        """(step, attempt) of the state that the slot holds, if it is complete."""
        try:
            return read(self.folder).save
        except (FileNotFoundError, CheckpointError):
            return None

    def move(self, folder: Path) -> None:
        """Rename the folder, with what it holds; the memory stays mapped, and page-locked."""
        self.folder.rename(folder)
        self.folder, self.file = folder, folder / self.file.name

    def commit(self, part: bytes) -> None:
        """Write the description atomically, which completes the slot."""
        partial = self.folder / f"{PART}.partial"
        partial.write_bytes(part)
        partial.rename(self.folder / PART)


def _map_file(path: Path, size: int) -> torch.Tensor:
    path.unlink(missing_ok=True)
    if size == 0:  # a rank that is primary for no tensor
        return torch.empty(0, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # reports a full file system here; otherwise a write would raise SIGBUS
        return torch.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | _POPULATE), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def encode(record: SlotRecord) -> bytes:
    """Serialise a description with its checksum."""
    text = record.model_dump_json().encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def read(folder: Path) -> SlotRecord:
    """Read the description of a slot and verify its checksum.

    Raises:
        CheckpointError: the description is damaged or cannot be read.
        FileNotFoundError: the slot is empty.
    """
    try:
        return SlotRecord.model_validate_json(read_text(folder))
    except ValidationError as error:
        raise CheckpointError(f"{folder / PART} is not of this format: {error.errors()[0]['msg']}.") from None


def read_text(folder: Path) -> bytes:
    """Read the description of a slot as JSON. See `read`."""
    try:
        digest, _, text = (folder / PART).read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder / PART} cannot be read: {error.strerror}.") from None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise CheckpointError(f"{folder / PART} is damaged.")
    return text


def list_slots(home: Path) -> list[Path]:
    """Return the complete slots of all nodes on this host."""
    return sorted(path.parent for path in home.glob(f"node-*/*/{PART}")) if is_private(home) else []


def read_all(home: Path) -> tuple[list[tuple[SlotRecord, Path]], list[CheckpointError]]:
    """Read the descriptions of this host's slots; return them and errors. A slot that disappears is in neither."""
    found, damaged = [], []
    for folder in list_slots(home):
        with contextlib.suppress(FileNotFoundError):
            try:
                found.append((read(folder), folder))
            except CheckpointError as error:
                damaged.append(error)
    return found, damaged


def newest_step(home: Path) -> int | None:
    """Return the newest step of which this host's memory holds a part."""
    found, _ = read_all(home)
    return max((record.step for record, _ in found), default=None)


def drop(home: Path, attempt: str, keep: tuple[int, str] | None = None) -> None:
    """Remove slots of earlier attempts, complete or not, except the save ``keep`` (step, attempt); and what a restore
    that was killed has received."""
    for folder in (*home.glob("node-*/*"), *home.glob("restoring-*")):
        if folder.name.startswith(f"{attempt}-"):
            continue
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            if read(folder).save == keep:
                continue
        shutil.rmtree(folder, ignore_errors=True)


def forget(home: Path, after: int) -> None:
    """Empty the slots of steps after ``after``; their mapped memory is reused."""
    for folder in list_slots(home):
        with contextlib.suppress(CheckpointError):  # a damaged slot is no state
            if read(folder).step <= after:
                continue
        (folder / PART).unlink(missing_ok=True)
