"""Load, verify and describe checkpoints, on any layout or in one process."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.base.addresses import AnyPath, to_path
from shoal.base.boxes import Piece
from shoal.base.errors import did_you_mean
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    MOST_BYTES,
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
    unusable,
)
from shoal.engine.checkpoint.write import State
from shoal.engine.collectives.json_collectives import HostGroup, all_gather, get_rank, get_size

ReadBox = Callable[[str], bytearray | memoryview]


def load(
    path: AnyPath,
    state: State,
    *,
    group: HostGroup = None,
    model: dict[str, Any] | None = None,
    convert: bool = False,
    ignore_prefixes: tuple[str, ...] = (),
    optional_prefixes: tuple[str, ...] = (),
    read: Callable[[], Manifest] | None = None,
    files: Mapping[str, AnyPath] | None = None,
) -> dict[str, Any]:
    """Fill the tensors of ``state`` in place from a checkpoint of any layout; return its ``extra``.

    Each rank reads only the stored boxes that overlap its own pieces, and verifies the checksum of each. All ranks
    return, or all raise; after an error during reading, the contents of the tensors are undefined.

    Args:
        state: this rank's pieces, primary or not.
        group: the ranks that load together; None if this process loads alone.
        model: JSON values, compared with ``extra["model"]`` before anything is read.
        convert: allow floating-point dtypes that differ from the saved ones.
        ignore_prefixes: prefixes of tensors that may be in the checkpoint and not in ``state``, such as
            ``"optimizer."``.
        optional_prefixes: prefixes of tensors that may also be missing in the checkpoint, or have another shape there;
            these stay unchanged.
        read: reads the checkpoint's content (default: from ``path``).
        files: locations of the files that this rank needs (default: in ``path``).

    Raises:
        CheckpointError: naming the file or tensor: another model, set of tensors, shape or dtype; or damage.
    """
    names, unread, problem, extra = set(state), set[str](), "", {}
    try:
        manifest = read() if read else read_manifest(path)
        extra = manifest.extra
        check_model(path, extra.get("model"), model)
        state = {name: pieces for name, pieces in state.items()
                 if not name.startswith(optional_prefixes) or _fits(manifest, name, pieces)}
        unread = manifest.tensors.keys() - names
        needed = {name for name in names if not name.startswith(optional_prefixes)}
        _check_present(path, set(manifest.tensors), needed)
        _check_tensors(path, manifest, state, convert)
        _fill(path, manifest, state, files)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    every = all_gather((problem, sorted(unread)), group)
    if found := dict.fromkeys(problem for problem, _ in every if problem):
        raise CheckpointError("\n".join(found))
    unread.intersection_update(*(others for _, others in every))
    _check_all_loaded(path, unread, (*ignore_prefixes, *optional_prefixes))
    return extra


def verify(path: AnyPath, *, group: HostGroup = None) -> None:
    """Read a complete checkpoint and compare every byte with the manifest's checksums; ranks share the files.

    Raises:
        CheckpointError: listing every damaged or missing file and tensor.
    """
    try:
        manifest = read_manifest(path)
        problems = _problems(path, manifest, sorted(manifest.files)[get_rank(group) :: get_size(group)])
    except (CheckpointError, OSError) as error:
        problems = [str(error)]
    raise_together(problems, group)


def check_part(folder: AnyPath, part: RankPart) -> None:
    """Compare every byte of one rank's file with its checksums.

    Raises:
        CheckpointError: listing everything damaged or missing.
    """
    if problems := _problems(folder, part, sorted(part.files)):
        raise CheckpointError("\n".join(problems))


def newest_good(folder: AnyPath) -> tuple[Committed | None, list[CheckpointError]]:
    """Return the newest checkpoint that verifies, and the errors of each newer one, which the user should see."""
    refused: list[CheckpointError] = []
    for found in reversed(list_checkpoints(folder)):
        try:
            verify(found.path)
        except CheckpointError as error:
            refused.append(error)
        else:
            return found, refused
    return None, refused


# ---- in one process --------------------------------------------------------------------------------------------------


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
    manifest = read_manifest(folder)
    saved = {name: each for name, each in manifest.tensors.items() if name.startswith(prefix)}
    for file in sorted({box.file for each in saved.values() for box in each.boxes}):
        _open(folder / file, manifest.files[file])  # before memory is allocated
    try:
        tensors = {
            name: torch.empty(each.shape, dtype=DTYPES[each.dtype], device=device) for name, each in saved.items()
        }
    except (RuntimeError, OverflowError, TypeError) as error:  # too large for the device, or for any device
        raise CheckpointError(f"{path}: its tensors do not fit on {device}: {error}.") from None
    state = {name: [Piece.full(tensor)] for name, tensor in tensors.items()}
    load(folder, state, ignore_prefixes=("",) if prefix else (), read=lambda: manifest)
    return tensors


def verify_checkpoint(path: str | Path) -> None:
    """Read a complete checkpoint, from its folder or URL, and compare every byte with its checksums.

    Raises:
        UsageError: it is not a checkpoint, or is damaged; lists every damaged or missing file and tensor.

    >>> import shoal
    >>> shoal.verify_checkpoint("runs/example/checkpoints/step-00000002")
    >>> shoal.verify_checkpoint("runs/example")
    Traceback (most recent call last):
    shoal.engine.checkpoint.manifest.CheckpointError: runs/example is not a complete checkpoint: ...
    """
    verify(to_path(path))


def describe_checkpoint(path: str | Path) -> Manifest:
    """Return the manifest of a checkpoint, by its folder or URL: every tensor with its shape, dtype and size.

    Raises:
        UsageError: it is not a checkpoint, or its manifest is damaged.

    >>> import shoal
    >>> found = shoal.describe_checkpoint("runs/example/checkpoints/step-00000002")
    >>> found.step, len(found.files), found.tensors["model.embed.token.weight"].shape
    (2, 1, (257, 32))
    """
    return read_manifest(to_path(path))


# ---- what must agree before anything is read -------------------------------------------------------------------------


def check_model(path: AnyPath, saved: Any, wanted: dict[str, Any] | None) -> None:
    """Check that a checkpoint holds the wanted model (None: any), both as JSON values.

    Raises:
        CheckpointError: naming every field that differs.
    """
    if wanted is None or saved == wanted:
        return
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} does not state which model it holds (no 'model' in its extra values).")
    differ = [
        f"{field}: {saved.get(field)!r} saved, {wanted.get(field)!r} in this run"
        for field in sorted(saved.keys() | wanted.keys())
        if (saved.get(field) or None) != (wanted.get(field) or None)  # an older checkpoint lacks newer parts
    ]
    if differ:
        raise CheckpointError(f"{path} holds another model than this run's:\n  " + "\n  ".join(differ))


def _check_present(path: AnyPath, saved: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - saved):
        raise CheckpointError(
            f"{path} has no tensor '{missing[0]}' ({len(missing)} missing in all); {did_you_mean(missing[0], saved)}"
        )


def _check_all_loaded(path: AnyPath, unread: set[str], ignore_prefixes: tuple[str, ...]) -> None:
    if left := sorted(name for name in unread if not name.startswith(ignore_prefixes)):
        raise CheckpointError(
            f"{path} holds tensor '{left[0]}', which no rank loads ({len(left)} such): the state that resumes is not "
            "the one that was saved.\n  To skip tensors intentionally, name their prefix in `ignore_prefixes`."
        )


def _fits(manifest: Manifest, name: str, pieces: list[Piece]) -> bool:
    stored = manifest.tensors.get(name)
    return stored is not None and all(tuple(piece.global_shape) == stored.shape for piece in pieces)


def _check_tensors(path: AnyPath, manifest: Manifest, state: State, convert: bool) -> None:
    for name, pieces in state.items():
        stored = manifest.tensors[name]
        for piece in pieces:
            if tuple(piece.global_shape) != stored.shape:
                raise CheckpointError(
                    f"{path}: tensor '{name}' was saved with shape {stored.shape}; this run has "
                    f"{tuple(piece.global_shape)}."
                )
            wanted, saved = piece.tensor.dtype, DTYPES[stored.dtype]
            floating = wanted.is_floating_point and saved.is_floating_point
            if wanted != saved and not (convert and floating):
                mend = "Allow it with convert." if floating else "Only floating-point dtypes can be converted."
                raise CheckpointError(
                    f"{path}: tensor '{name}' was saved as {stored.dtype}, but this run has "
                    f"{DTYPE_NAMES.get(wanted, wanted)}.\n  {mend}"
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
def _fill(path: AnyPath, manifest: Manifest, state: State, files: Mapping[str, AnyPath] | None) -> None:
    """Copy the intersections of stored boxes and local pieces, one file at a time."""
    wanted = touched(manifest, state)
    filled = dict.fromkeys(state, 0)
    for file, boxes in sorted(wanted.items()):
        place = path / file if files is None else files[file]
        read_box = _open(place, manifest.files[file])
        for name, stored, pieces in boxes:
            values = _read(place, read_box, name, stored, DTYPES[manifest.tensors[name].dtype])
            for piece in pieces:
                common = piece.box.intersect(stored.box)
                assert common is not None  # `touched` only returns overlapping pieces
                piece.tensor[common.to_local(piece.box).slices].copy_(values[common.to_local(stored.box).slices])
                filled[name] += common.numel
    for name, pieces in state.items():
        if filled[name] != (needed := sum(piece.box.numel for piece in pieces)):
            raise unusable(path, f"stores {filled[name]} of the {needed} elements of tensor '{name}'")


def _open(path: AnyPath, expected: StoredFile) -> ReadBox:
    """Check the size and header of a file, and return a function that reads the bytes of a box."""
    try:
        if not storage.is_inside_folder(path):
            raise unusable(path, "is a link out of the checkpoint's folder, or no file")
        size = storage.size(path)
        if size != expected.bytes:
            raise unusable(path, f"is damaged: {size} bytes, but {expected.bytes} were written")
        if expected.header_bytes > min(size, MOST_BYTES):
            raise unusable(path, f"is damaged: a header of {expected.header_bytes} bytes in a file of {size}")
        header = storage.read(path, expected.header_bytes)
    except OSError as error:
        raise unusable(path, f"cannot be read: {error.strerror}") from None
    if checksum(header) != expected.header:
        raise unusable(path, "is damaged: its header is not the one that was written")
    try:
        entries = json.loads(header[8:])
    except (RecursionError, ValueError) as error:
        raise unusable(path, f"is not a file of this checkpoint: its header is no JSON: {error}") from None
    read = storage.open_ranges(path)

    def read_box(name: str) -> bytearray | memoryview:
        start, stop = entries[name]["data_offsets"]
        return read(len(header) + start, len(header) + stop)

    return read_box


def _read(file: AnyPath, read_box: ReadBox, name: str, stored: StoredBox, dtype: torch.dtype) -> Tensor:
    try:
        data = read_box(key(name, stored.box))
        if checksum(data) == stored.checksum and len(data) == stored.box.numel * dtype.itemsize:
            return torch.frombuffer(data, dtype=dtype).view(stored.shape)
    except (LookupError, TypeError, ValueError):  # a header without this box
        pass
    raise unusable(file, f"is damaged: tensor '{name}' at {key('', stored.box)} is not what was written")


def _problems(path: AnyPath, manifest: Manifest | RankPart, files: list[str]) -> list[str]:
    """Return all errors in some files."""
    boxes: dict[str, list[tuple[str, StoredBox]]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            boxes[box.file].append((name, box))
    problems = []
    for file in files:
        try:
            read_box = _open(path / file, manifest.files[file])
        except CheckpointError as error:
            problems.append(str(error))
            continue
        damaged = []
        for name, box in boxes[file]:
            try:
                _read(path / file, read_box, name, box, DTYPES[manifest.tensors[name].dtype])
            except CheckpointError:
                damaged.append(f"tensor '{name}' at {key('', box.box)}")
        if damaged:
            more = f", nor {len(damaged) - 1} others of {len(boxes[file])}" if len(damaged) > 1 else ""
            problems.append(str(unusable(path / file, f"is damaged: {damaged[0]} is not what was written{more}")))
    return problems


def raise_together(problems: list[str], group: HostGroup) -> None:
    """Raise the errors of all ranks on every rank, without duplicates."""
    if found := dict.fromkeys(problem for rank in all_gather(problems, group) for problem in rank):
        raise CheckpointError("\n".join(found))
