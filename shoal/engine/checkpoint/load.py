"""Load checkpoints into any layout, and verify the data on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.base.boxes import Piece
from shoal.base.errors import did_you_mean
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from shoal.engine.checkpoint.manifest import (
    MEND,
    CheckpointError,
    Committed,
    Manifest,
    RankPart,
    StoredBox,
    StoredFile,
    checksum,
    key,
    list_checkpoints,
    read_manifest,
)
from shoal.engine.checkpoint.storage import Place
from shoal.engine.checkpoint.write import State
from shoal.engine.collectives.json_collectives import Group, broadcast, gather, rank_of, size_of


def load(
    path: Place,
    state: State,
    *,
    group: Group = None,
    model: dict[str, Any] | None = None,
    convert: bool = False,
    unwanted: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Fill the tensors of ``state`` in place from a checkpoint of any layout; return its ``extra``.

    Each rank reads only the stored boxes that overlap its own pieces, and verifies the checksum of each. All ranks
    return, or all raise; after an error during reading, the contents of the tensors are undefined.

    Args:
        path: folder of one checkpoint.
        state: this rank's pieces, primary or not.
        group: the ranks that load together; None if this process loads alone.
        model: JSON values, compared with ``extra["model"]`` before anything is read.
        convert: allow floating-point dtypes that differ from the saved ones.
        unwanted: prefixes of tensors that may be in the checkpoint and not in ``state``, such as ``"optimizer."``.
        optional: prefixes of tensors that may also be missing in the checkpoint, or have another shape there; these
            stay unchanged.

    Raises:
        CheckpointError: naming the file or tensor: another model, set of tensors, shape or dtype; or damage.
    """
    every = set(broadcast(sorted(set().union(*gather(sorted(state), group))), group))
    problem, extra = "", {}
    try:
        manifest = read_manifest(path)
        extra = manifest.extra
        check_model(path, extra.get("model"), model)
        state = {name: pieces for name, pieces in state.items()
                 if not name.startswith(optional) or _fits(manifest, name, pieces)}
        every = {name for name in every if not name.startswith(optional)}
        _check_names(path, set(manifest.tensors), every, (*unwanted, *optional))
        _check_tensors(path, manifest, state, convert)
        _fill(path, manifest, state)
    except CheckpointError as error:
        problem = str(error)
    _raise_together([problem] if problem else [], group)
    return extra


def verify(path: Place, *, group: Group = None) -> None:
    """Read a complete checkpoint and compare every byte with the manifest's checksums; ranks share the files.

    Raises:
        CheckpointError: listing every damaged or missing file and tensor.
    """
    try:
        manifest = read_manifest(path)
        problems = _problems(path, manifest, sorted(manifest.files)[rank_of(group) :: size_of(group)])
    except CheckpointError as error:
        problems = [str(error)]
    _raise_together(problems, group)


def check_part(folder: Place, part: RankPart) -> None:
    """Compare every byte of one rank's file with its checksums.

    Raises:
        CheckpointError: listing everything damaged or missing.
    """
    if problems := _problems(folder, part, sorted(part.files)):
        raise CheckpointError("\n".join(problems))


def newest_good(folder: Place, *, group: Group = None) -> tuple[Committed | None, list[CheckpointError]]:
    """Return the newest checkpoint that verifies, and the errors of each newer one, which the user should see."""
    listed = broadcast([(step, path.name) for step, path in list_checkpoints(folder)], group)
    refused: list[CheckpointError] = []
    for step, name in reversed(listed):
        found = Committed(step, folder / name)
        try:
            verify(found.path, group=group)
        except CheckpointError as error:
            refused.append(error)
        else:
            return found, refused
    return None, refused


# ---- what must agree before anything is read -------------------------------------------------------------------------


def check_model(path: Place, saved: Any, wanted: dict[str, Any] | None) -> None:
    """Check that a checkpoint holds the wanted model (None: any), both as JSON values.

    Raises:
        CheckpointError: naming every field that differs.
    """
    if wanted is None or saved == wanted:
        return
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} does not say which model it holds (no 'model' in its extra values).")
    differ = [
        f"{field}: {saved.get(field)!r} saved, {wanted.get(field)!r} here"
        for field in sorted(saved.keys() | wanted.keys())
        if saved.get(field) != wanted.get(field)
    ]
    if differ:  # a field omitted on both sides does not differ
        raise CheckpointError(f"{path} holds another model than this run's:\n  " + "\n  ".join(differ))


def _check_names(path: Place, saved: set[str], wanted: set[str], unwanted: tuple[str, ...]) -> None:
    if missing := sorted(wanted - saved):
        raise CheckpointError(
            f"{path} has no tensor '{missing[0]}' ({len(missing)} missing in all); {did_you_mean(missing[0], saved)}"
        )
    if left := sorted(name for name in saved - wanted if not name.startswith(unwanted)):
        raise CheckpointError(
            f"{path} holds tensor '{left[0]}', which no rank wants ({len(left)} such): the state that resumes is not "
            "the one that was saved.\n  To leave some out on purpose, name their prefix in `unwanted`."
        )


def _fits(manifest: Manifest, name: str, pieces: list[Piece]) -> bool:
    stored = manifest.tensors.get(name)
    return stored is not None and all(tuple(piece.whole) == stored.shape for piece in pieces)


def _check_tensors(path: Place, manifest: Manifest, state: State, convert: bool) -> None:
    for name, pieces in state.items():
        stored = manifest.tensors[name]
        for piece in pieces:
            if tuple(piece.whole) != stored.shape:
                raise CheckpointError(
                    f"{path}: tensor '{name}' was saved with shape {stored.shape}, and here it is {tuple(piece.whole)}."
                )
            here, there = piece.tensor.dtype, DTYPES[stored.dtype]
            floating = here.is_floating_point and there.is_floating_point
            if here != there and not (convert and floating):
                mend = "Allow it with convert." if floating else "Only floating-point dtypes can be converted."
                raise CheckpointError(
                    f"{path}: tensor '{name}' was saved as {stored.dtype}, and here it is "
                    f"{DTYPE_NAMES.get(here, here)}.\n  {mend}"
                )


# ---- reading ---------------------------------------------------------------------------------------------------------


def touched(manifest: Manifest, state: State) -> dict[str, list[tuple[str, StoredBox, list[Piece]]]]:
    """Return the stored boxes that local pieces need, by file, with the tensor's name and those pieces."""
    wanted: dict[str, list[tuple[str, StoredBox, list[Piece]]]] = defaultdict(list)
    for name in state.keys() & manifest.tensors.keys():
        for box in manifest.tensors[name].boxes:
            if hit := [piece for piece in state[name] if piece.box.intersect(box.box)]:
                wanted[box.file].append((name, box, hit))
    return wanted


@torch.no_grad()
def _fill(path: Place, manifest: Manifest, state: State) -> None:
    """Copy the intersections of stored boxes and local pieces, one file at a time."""
    wanted = touched(manifest, state)
    filled = dict.fromkeys(state, 0)
    for file, boxes in sorted(wanted.items()):
        with _opened(path / file, manifest.files[file]) as tensors:
            for name, stored, pieces in boxes:
                values = _read(path, tensors, name, stored, DTYPES[manifest.tensors[name].dtype])
                for piece in pieces:
                    common = piece.box.intersect(stored.box)
                    assert common is not None  # `touched` only returns overlapping pieces
                    piece.tensor[common.inside(piece.box).slices].copy_(values[common.inside(stored.box).slices])
                    filled[name] += common.numel
    for name, pieces in state.items():
        if filled[name] != (needed := sum(piece.box.numel for piece in pieces)):
            raise CheckpointError(f"{path}: tensor '{name}': {filled[name]} of {needed} elements are stored.\n{MEND}")


@contextmanager
def _opened(path: Place, expected: StoredFile) -> Iterator[storage.Tensors]:
    """Open one file of a checkpoint, after checking its size and header."""
    try:
        if not storage.is_own(path):
            raise CheckpointError(f"{path} is a link out of the checkpoint's folder, or no file.\n{MEND}")
        size, header = storage.size(path), storage.read(path, expected.header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.\n{MEND}") from None
    if size != expected.bytes:
        raise CheckpointError(f"{path} is damaged: {size} bytes, but {expected.bytes} were written.\n{MEND}")
    if checksum(header) != expected.header:
        raise CheckpointError(f"{path} is damaged: its header is not the one that was written.\n{MEND}")
    try:
        with storage.open_tensors(path) as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a file of this checkpoint: {error}.\n{MEND}") from None


def _read(path: Place, tensors: storage.Tensors, name: str, stored: StoredBox, dtype: torch.dtype) -> torch.Tensor:
    values = tensors.get_tensor(key(name, stored.box))
    if tuple(values.shape) != stored.shape or values.dtype != dtype or checksum(values) != stored.checksum:
        raise CheckpointError(
            f"{path / stored.file} is damaged: tensor '{name}' at {key('', stored.box)} is not what was written."
            f"\n{MEND}"
        )
    return values


def _problems(path: Place, manifest: Manifest | RankPart, files: list[str]) -> list[str]:
    """Return all errors in some files."""
    boxes: dict[str, list[tuple[str, StoredBox]]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            boxes[box.file].append((name, box))
    return [problem for file in files for problem in _damage(path, manifest, file, boxes[file])]


def _damage(path: Place, manifest: Manifest | RankPart, file: str, boxes: list[tuple[str, StoredBox]]) -> list[str]:
    """Return all errors in one file."""
    problems = []
    try:
        with _opened(path / file, manifest.files[file]) as tensors:
            for name, box in boxes:
                try:
                    _read(path, tensors, name, box, DTYPES[manifest.tensors[name].dtype])
                except CheckpointError as error:
                    problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _raise_together(problems: list[str], group: Group) -> None:
    """Raise the errors of all ranks on every rank, without duplicates."""
    found = [problem for rank in gather(problems, group) for problem in rank]
    if found := broadcast(list(dict.fromkeys(found)), group):
        raise CheckpointError("\n".join(found))
