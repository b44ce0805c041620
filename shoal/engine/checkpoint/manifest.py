"""Manifest of a checkpoint: its content as plain data, its validity rules, and the list of checkpoints in a folder."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import torch
import xxhash
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Box
from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.checkpoint import storage
from shoal.spec.config import SAVED

MANIFEST, MANIFEST_SUM = storage.COMMITS, "manifest.sha256"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes of checkpoints, by their names in the safetensors format."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
UNCOMMITTED = re.compile(r"\.staging-(removed-)?(step-\d{8,})-[0-9a-f]{8}")
"""Name of a checkpoint before its commit, or (``removed-``) while it is deleted, with its name between the two."""

ASIDE = "set-aside-"
"""Start of the name of a checkpoint that must not be overwritten, before its own name and a random suffix."""

MOST_BYTES = 256 << 20  # of a manifest: about a million boxes


class CheckpointError(UsageError):
    """Error in saving or loading a checkpoint; names the file or tensor, the reason and a remedy. Exits with code 2."""


class Committed(NamedTuple):
    """A complete checkpoint."""

    step: int
    path: AnyPath


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"no dtype of a checkpoint; {did_you_mean(dtype, DTYPES)}")
    return dtype


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


FileName = Annotated[str, StringConstraints(pattern=r"^rank-[0-9]+\.safetensors$")]
"""Name of a file in the checkpoint's own folder; rejects a manipulated manifest with paths to elsewhere."""

Sizes = Annotated[tuple[NonNegativeInt, ...], Field(max_length=8)]


class StoredBox(_ManifestModel):
    """One box of a tensor, stored under `key` in one file."""

    file: FileName
    """Name of its file, in the checkpoint's own folder."""

    offset: Sizes
    """Offset in the unsharded tensor."""

    shape: Sizes
    """Shape of the box."""

    checksum: str
    """`checksum` of its bytes."""

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class StoredTensor(_ManifestModel):
    """One named tensor: its global shape, dtype and stored boxes."""

    shape: Sizes
    """Global shape."""

    dtype: Annotated[str, AfterValidator(_known)]
    """A key of `DTYPES`."""

    boxes: list[StoredBox]
    """Boxes that cover the tensor exactly once."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class StoredFile(_ManifestModel):
    """Properties of a file that are checked before its tensors are used."""

    bytes: NonNegativeInt
    """Size of the file."""

    header_bytes: NonNegativeInt
    """Size of the safetensors header with its 8-byte length."""

    header: str
    """`checksum` of the header."""


class RankPart(_ManifestModel):
    """Content written by one rank."""

    files: dict[FileName, StoredFile]
    """At most one file; a rank without primary pieces writes none."""

    tensors: dict[str, StoredTensor]
    """Only boxes in this rank's file."""

    names: list[str]
    """All names in this rank's state, including tensors of which it holds no piece."""


class Manifest(_ManifestModel):
    """Complete content of one checkpoint."""

    format: Literal["shoal-checkpoint"] = "shoal-checkpoint"
    version: Literal[1] = 1
    step: NonNegativeInt
    """Number of completed optimizer steps."""

    extra: dict[str, Any]
    """All values besides tensors: the model's shape, the run's config, counters."""

    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]

    def __repr__(self) -> str:
        held = f"{len(self.tensors)} tensors of {self.bytes:,} bytes"
        return f"<Manifest: step {self.step}, {held} in {len(self.files)} files>"

    __str__ = __repr__

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        for name, tensor in self.tensors.items():
            for box in tensor.boxes:
                if not len(box.offset) == len(box.shape) == len(tensor.shape):
                    raise ValueError(f"tensor '{name}': a box has another number of dims than its shape {tensor.shape}")
                if box.file not in self.files:
                    raise ValueError(f"tensor '{name}' is stored in {box.file}, which is not in the list of files")
            check_cover(name, tensor.shape, [box.box for box in tensor.boxes])
        return self


def key(name: str, box: Box) -> str:
    """Return the name of a box in its safetensors file.

    >>> key("model.head.weight", Box((0, 8), (4, 8)))
    'model.head.weight[0:4,8:16]'
    """
    return f"{name}[{','.join(f'{s.start}:{s.stop}' for s in box.slices)}]"


def checksum(data: bytes | bytearray | memoryview | torch.Tensor) -> str:
    """Return the 128-bit XXH3 hash of the bytes, at memory speed. It detects damage, but not deliberate forgery."""
    if isinstance(data, torch.Tensor):
        data = data.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return xxhash.xxh3_128_hexdigest(data)


# ---- rules -----------------------------------------------------------------------------------------------------------


def merge(step: int, extra: dict[str, Any], parts: Iterable[RankPart]) -> Manifest:
    """Merge all ranks' parts into one manifest.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its boxes do not cover it exactly once.
    """
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    names: set[str] = set()
    for part in parts:
        files |= part.files
        names |= set(part.names)
        for name, tensor in part.tensors.items():
            known = tensors.setdefault(name, StoredTensor(shape=tensor.shape, dtype=tensor.dtype, boxes=[]))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"tensor '{name}' is {known.dtype} {known.shape} on one rank and {tensor.dtype} {tensor.shape} on "
                    "another: every rank must give the same global shape and dtype."
                )
            known.boxes += tensor.boxes
    if unheld := sorted(names - set(tensors)):
        raise CheckpointError(f"no rank holds a piece of tensor '{unheld[0]}' ({len(unheld)} such): it would be lost.")
    try:
        return Manifest(step=step, extra=extra, files=files, tensors=dict(sorted(tensors.items())))
    except ValidationError as error:
        raise CheckpointError(error.errors()[0]["msg"]) from None


def check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that the boxes cover a tensor of this shape exactly once.

    Sweeps along dim 0, so that a box is compared only with boxes that share rows with it.

    Raises:
        CheckpointError: elements outside, covered twice, or missing.
    """
    full = Box.full(shape)
    alive: list[Box] = []
    for box in sorted((b for b in boxes if b.numel), key=lambda b: b.offset):
        if len(box.shape) != len(shape) or full.intersect(box) != box:
            raise CheckpointError(f"tensor '{name}': the piece {key('', box)} reaches outside its shape {shape}.")
        alive = [a for a in alive if a.shape and a.offset[0] + a.shape[0] > box.offset[0]] if shape else alive
        if twice := next((a for a in alive if a.intersect(box)), None):
            raise CheckpointError(
                f"tensor '{name}': the pieces {key('', twice)} and {key('', box)} overlap: exactly one rank may be "
                "primary for an element."
            )
        alive.append(box)
    held, needed = sum(b.numel for b in boxes), math.prod(shape)
    if held != needed:
        raise CheckpointError(
            f"tensor '{name}' {shape}: {needed - held} of {needed} elements would be lost: no rank is primary for them."
        )


# ---- on disk ---------------------------------------------------------------------------------------------------------


def write_manifest(folder: AnyPath, manifest: Manifest) -> None:
    """Write the manifest and its SHA-256 (``sha256sum --check manifest.sha256`` checks it by hand)."""
    data = manifest.model_dump_json(indent=1).encode()
    storage.write(folder / MANIFEST_SUM, [f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode()])
    storage.write(folder / MANIFEST, [data])


def read_manifest(path: AnyPath) -> Manifest:
    """Read the manifest of a checkpoint and check that it is undamaged.

    Raises:
        CheckpointError: not a checkpoint, damaged, or of another version of the format.
    """
    try:
        data, sum_line = storage.read(path / MANIFEST, MOST_BYTES + 1), storage.read(path / MANIFEST_SUM, 1024)
    except OSError as error:
        last = None
        with suppress(OSError):  # of a run's folder
            last = newest(path / "checkpoints") or newest(path)
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {error.strerror}: {error.filename}.\n"
            f"  Give the folder of one step, such as {last.path if last else 'checkpoints/step-00000100'}."
        ) from None
    if len(data) > MOST_BYTES:
        raise unusable(path / MANIFEST, f"is damaged: it has more than {MOST_BYTES >> 20} MiB")
    if sum_line.split()[:1] != [hashlib.sha256(data).hexdigest().encode()]:
        raise unusable(path / MANIFEST, f"is damaged: its SHA-256 is not the one in {MANIFEST_SUM}")
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path / MANIFEST} is not of this format: {where}: {first['msg']}.") from None


def unusable(path: AnyPath, why: str) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(f"{path} {why}.\n  Resume from an older checkpoint, or restore this one from a copy.")


def list_checkpoints(folder: AnyPath) -> list[Committed]:
    """Return the committed checkpoints in a folder, oldest first; `verify` checks that they are still intact."""
    found = ((SAVED.fullmatch(name), folder / name) for name in storage.list_names(folder))
    return sorted(
        Committed(int(match[1]), path) for match, path in found if match and storage.exists(path / MANIFEST)
    )


def list_interrupted(folder: AnyPath) -> list[tuple[AnyPath, AnyPath]]:
    """Return the complete checkpoints of saves that were killed between setting the old one of their step aside and
    their commit, each with its path once committed. On a disk only: an object store has no names of before a commit.
    """
    names = storage.list_names(folder)
    found = {  # by step: one is enough
        match[2]: folder / match[0] for match in map(UNCOMMITTED.fullmatch, names)
        if match and not match[1] and match[2] not in names
        and any(name.startswith(f"{ASIDE}{match[2]}-") for name in names) and _is_undamaged(folder / match[0])
    }
    return [(path, folder / name) for name, path in found.items()]


def _is_undamaged(path: AnyPath) -> bool:
    """Return whether a checkpoint's manifest, which is written last, is undamaged."""
    try:
        return bool(read_manifest(path))
    except CheckpointError:
        return False


def newest(folder: AnyPath) -> Committed | None:
    """Return the committed checkpoint with the highest step, or None."""
    return next(reversed(list_checkpoints(folder)), None)
