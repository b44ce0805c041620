"""Resume from the newest state, in memory or on disk, on any layout.

A save in memory is a checkpoint whose files are spread over several hosts, some in two copies. The ranks exchange lists
of their files, and the newest save with every rank's part is loaded like any checkpoint: from local files, and from
other files that a host's ranks need, which are sent over the network. A state that cannot be used is reported, and the
next one taken: local files are not written, so a full memory does not prevent it.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.addresses import AnyPath
from shoal.base.errors import UsageError
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, load, storage, verify
from shoal.engine.checkpoint.load import check_part, raise_together, touched
from shoal.engine.checkpoint.manifest import Manifest, merge
from shoal.engine.checkpoint.write import State, file_name
from shoal.engine.collectives.json_collectives import HostGroup, all_gather, get_rank
from shoal.training.resilience import memory_slot
from shoal.training.resilience.host_memory_dir import make_run_dir
from shoal.training.resilience.memory_checkpoint import RankTopology, split_messages
from shoal.training.resilience.memory_slot import SlotRecord

# A resumed run may use other number formats; state that only one format has ("precision.") is then reset.
_load = partial(load, convert=True, optional_prefixes=("precision.",))


@dataclass(frozen=True)
class Restored:
    """A loaded state."""

    step: int  # optimizer steps done
    extra: dict[str, Any]  # values saved with it
    save: tuple[int, str] | None  # (step, attempt) if it came from memory; None if from disk
    source: str  # description of the source


@dataclass(frozen=True)
class _Copy:
    """Copy of one rank's part of a save of ``world_size`` ranks, in the memory of the host of rank ``holder``."""

    step: int
    world_size: int
    folder: str
    holder: int


Save = dict[int, list[_Copy]]
"""The copies of each rank's part of one save across the memories of all hosts; equal on all ranks."""


def restore(
    checkpoints: AnyPath,
    home: Path,
    state: State,
    *,
    group: HostGroup,
    model: dict[str, Any] | None,
    before: int | None = None,
    places: RankTopology | None = None,
) -> tuple[Restored | None, list[str]]:
    """Fill the tensors of ``state`` from the newest complete state; of equal steps, memory is preferred. Collective.

    Args:
        home: the run's directory in this host's memory; need not exist.
        group: gloo group of all ranks, without pending operations.
        model: see `shoal.engine.checkpoint.load`.
        before: largest acceptable step.
        places: of the group (default: collected).

    Returns:
        The loaded state, or None if none exists; and a line for each newer state that was refused. Equal on all ranks.
    """
    places = places or RankTopology.collect(group)
    saves, on_disk, notes = _list_saves(checkpoints, home, places, group)
    order = sorted([(step, 1, attempt) for step, attempt in saves] + [(step, 0, name) for step, name in on_disk])
    while order:
        step, in_memory, name = order.pop()
        if before is not None and step > before:
            continue
        try:
            if in_memory:
                extra = _load_from_memory(home, places, saves[step, name], state, group, model)
                return Restored(step, extra, (step, name), "from memory"), notes
            path = checkpoints / name
            verify(path, group=group)
            return Restored(step, _load(path, state, group=group, model=model), None, f"from {path}"), notes
        except CheckpointError as error:
            damaged, left = _drop_damaged(saves[step, name], places, group) if in_memory else ([], False)
            tier = "in memory" if in_memory else "checkpoint"
            notes += [f"{tier} refused: {line}" for line in damaged or [str(error)]]
            if damaged and left:
                order.append((step, in_memory, name))
    return None, notes


# ---- saves in memory -------------------------------------------------------------------------------------------------


def _list_saves(
    checkpoints: AnyPath, home: Path, places: RankTopology, group: HostGroup
) -> tuple[dict[tuple[int, str], Save], list[tuple[int, str]], list[str]]:
    """Return saves in memory by (step, attempt), checkpoints on disk as (step, name), and notes on damaged ones.

    Only descriptions are read: `load` verifies what it uses, and a large state is not read twice.
    """
    rank, copies, on_disk, notes = get_rank(group), list[tuple[Any, ...]](), list[tuple[int, str]](), list[str]()
    if places.first_on_host(rank) == rank:
        intact, errors = memory_slot.read_all(home)
        copies = [(each.step, each.attempt, each.rank, each.world_size, str(folder)) for each, folder in intact]
        notes = [f"in memory refused: {error}" for error in errors]
    try:
        if rank == 0:
            on_disk = [(step, path.name) for step, path in list_checkpoints(checkpoints)]
    except Exception as error:  # a disk that is gone; each object-store library has its own exceptions
        notes.append(f"checkpoints in {checkpoints} cannot be listed: {error}")
    every = all_gather((copies, on_disk, notes), group)
    saves: dict[tuple[int, str], Save] = defaultdict(lambda: defaultdict(list))
    for holder, (held, _, _) in enumerate(every):
        for step, attempt, owner, world_size, folder in held:
            saves[step, attempt][owner].append(_Copy(step, world_size, folder, holder))
    return saves, [(step, name) for step, name in every[0][1]], [note for *_, notes in every for note in notes]


def _drop_damaged(save: Save, places: RankTopology, group: HostGroup) -> tuple[list[str], bool]:
    """Verify every byte of a save's copies, and drop the damaged ones. Ranks of a host share the work.

    Returns:
        A line for each damaged copy, and whether a copy is left. Equal on all ranks.
    """
    rank = get_rank(group)
    on_host = [copy for held in save.values() for copy in held if places.hosts[copy.holder] == places.hosts[rank]]
    local = [r for r, host in enumerate(places.hosts) if host == places.hosts[rank]]
    damaged = []
    for copy in on_host[local.index(rank) :: len(local)]:
        try:
            check_part(Path(copy.folder), memory_slot.read(Path(copy.folder)).part)
        except (CheckpointError, FileNotFoundError) as error:
            damaged.append((copy.holder, copy.folder, str(error)))
    found = {(holder, folder): why for each in all_gather(damaged, group) for holder, folder, why in each}
    for owner, held in list(save.items()):
        save[owner] = [copy for copy in held if (copy.holder, copy.folder) not in found]
        if not save[owner]:
            del save[owner]
    return list(found.values()), bool(save)


def _load_from_memory(
    home: Path, places: RankTopology, save: Save, state: State, group: HostGroup, model: dict[str, Any] | None
) -> dict[str, Any]:
    """Assemble a save on each host and load it.

    Raises:
        CheckpointError: on every rank: a part is missing, or loading failed (see `load`).
    """
    some = next(iter(save.values()))[0]
    if lost := sorted(set(range(some.world_size)) - save.keys()):
        which = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of {some.world_size}"
        raise CheckpointError(f"step {some.step}: no node has the part of {which}.")
    if len(set(places.hosts)) == 1:  # each rank reads all files itself, and `load` exchanges its errors
        folders = {owner: Path(copies[0].folder) for owner, copies in sorted(save.items())}
        files = {file_name(owner): folder / file_name(owner) for owner, folder in folders.items()}

        def read() -> Manifest:
            return _merge([memory_slot.read(folder) for folder in folders.values()])

        return _load(home, state, group=group, model=model, read=read, files=files)
    holders = {file_name(owner): copies for owner, copies in save.items()}
    manifest = _merge(_exchange_records(save, group))  # or its error on every rank, as all have the same records
    folder = home / f"restoring-{places.token}"
    try:
        files = _collect_files(folder, places, sorted(touched(manifest, state)), holders, group)
        return _load(home, state, group=group, model=model, read=lambda: manifest, files=files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merge(records: list[SlotRecord]) -> Manifest:
    """Merge the descriptions of all parts of a save.

    Raises:
        CheckpointError: they do not fit together.
    """
    try:
        return merge(records[0].step, records[0].extra, [record.part for record in records])
    except CheckpointError as error:
        raise CheckpointError(f"step {records[0].step}: {error}") from None


def _exchange_records(save: Save, group: HostGroup) -> list[SlotRecord]:
    """Return the description of each rank's part, read by the holder of its first copy.

    Raises:
        CheckpointError: on every rank: one has been damaged since it was listed.
    """
    texts, problems = {}, []
    for owner, (copy, *_) in save.items():
        if copy.holder == get_rank(group):
            try:
                texts[owner] = memory_slot.read_text(Path(copy.folder)).decode()
            except (CheckpointError, FileNotFoundError) as error:
                problems.append(str(error))
    every = all_gather((sorted(texts.items()), problems), group)
    if found := [problem for _, problems in every for problem in problems]:
        raise CheckpointError("\n".join(found))
    texts = {owner: text for owned, _ in every for owner, text in owned}
    return [SlotRecord.model_validate_json(texts[owner]) for owner in sorted(save)]


def _collect_files(
    folder: Path, places: RankTopology, needed: list[str], holders: dict[str, list[_Copy]], group: HostGroup
) -> dict[str, Path]:
    """Return the paths of the needed files on this host; those that only other hosts have are received into ``folder``.

    Args:
        needed: by this rank. All ranks of a host use one copy.

    Raises:
        CheckpointError: on every rank: a file could not be read, or this host has no space for it.
    """
    rank = get_rank(group)

    def near(file: str, host: str) -> Path | None:
        return next((Path(copy.folder) / file for copy in holders[file] if places.hosts[copy.holder] == host), None)

    if all(near(file, host) for file in holders for host in set(places.hosts)):  # nothing to send
        return {file: near(file, places.hosts[rank]) or folder for file in needed}
    every = all_gather(needed, group)
    wanted: dict[int, set[str]] = defaultdict(set)  # files needed on a host, by its first rank
    for asking, files in enumerate(every):
        wanted[places.first_on_host(asking)].update(files)
    found, problems = {}, []
    for first, files in sorted(wanted.items()):
        for file in sorted(files):
            path, copy = near(file, places.hosts[first]), holders[file][0]
            if places.first_on_host(rank) == first:
                found[file] = path or folder / file
            if path:
                continue
            try:
                if rank == copy.holder:
                    _send(Path(copy.folder) / file, first, group)
                elif rank == first:
                    _receive(folder / file, copy.holder, group)
            except (OSError, UsageError) as error:
                problems.append(f"rank {rank}: {error}")
    raise_together(problems, group)
    return found


def _send(path: Path, to: int, group: HostGroup) -> None:
    try:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    except OSError:
        dist.send(torch.tensor([-1]), group=group, group_dst=to)
        raise
    dist.send(torch.tensor([data.numel()]), group=group, group_dst=to)
    for part in split_messages(data):
        dist.send(part, group=group, group_dst=to)


def _receive(path: Path, source: int, group: HostGroup) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=source)
    data = torch.empty(max(0, int(size)), dtype=torch.uint8)
    for part in split_messages(data):
        dist.recv(part, group=group, group_src=source)
    if int(size) >= 0:
        make_run_dir(path.parent.parent)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        storage.write(path, [memoryview(data.numpy().data)])
