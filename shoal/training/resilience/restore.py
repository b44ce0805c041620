"""Resume from the newest state, in memory or on disk, on any layout.

A save in memory is a checkpoint whose files are spread over several hosts, some in two copies. The ranks exchange lists
of their files, and the newest save with every rank's part is loaded like any checkpoint: from local files, and from
other files that a host's ranks need, which are sent over the network. A state that cannot be used is reported, and the
next one taken: local files are not written, so a full memory does not prevent it.
"""

from __future__ import annotations

import secrets
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.addresses import AnyPath
from shoal.base.errors import UsageError
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, load, storage, verify
from shoal.engine.checkpoint.load import check_part, raise_together, touched
from shoal.engine.checkpoint.manifest import merge
from shoal.engine.checkpoint.write import State, file_name
from shoal.engine.collectives.json_collectives import HostGroup, all_gather, broadcast, gather, get_rank
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


@dataclass
class _Save:
    """One save across the memories of all hosts, on rank 0.

    Attributes:
        holders: locations of each rank's file: (a rank on that host, the slot's folder).
    """

    records: dict[int, SlotRecord] = field(default_factory=dict)
    holders: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))


def restore(
    checkpoints: AnyPath,
    home: Path,
    state: State,
    *,
    group: HostGroup,
    model: dict[str, Any] | None,
    before: int | None = None,
) -> tuple[Restored | None, list[str]]:
    """Fill the tensors of ``state`` from the newest complete state; of equal steps, memory is preferred. Collective.

    Args:
        home: the run's directory in this host's memory; need not exist.
        group: gloo group of all ranks, without pending operations.
        model: see `shoal.engine.checkpoint.load`.
        before: largest acceptable step.

    Returns:
        The loaded state, or None if none exists; and a line for each newer state that was refused. Equal on all ranks.
    """
    places = RankTopology.collect(group)
    saves, notes = _saves_in_memory(home, places, group)
    order = [(step, 1, attempt) for step, attempt in saves]
    try:
        if get_rank(group) == 0:
            order += [(step, 0, path.name) for step, path in list_checkpoints(checkpoints)]
    except Exception as error:  # a disk that is gone; each object-store library has its own exceptions
        notes.append(f"checkpoints in {checkpoints} cannot be listed: {error}")
    order, notes = broadcast((sorted(order), notes), group)
    while order:
        step, in_memory, name = order.pop()
        if before is not None and step > before:
            continue
        try:
            if in_memory:
                extra = _load_from_memory(home, places, saves.get((step, name)), state, group, model)
                return Restored(step, extra, (step, name), "from memory"), notes
            path = checkpoints / name
            verify(path, group=group)
            return Restored(step, _load(path, state, group=group, model=model), None, f"from {path}"), notes
        except CheckpointError as error:
            damaged, left = _drop_damaged(saves.get((step, name)), places, group) if in_memory else ([], False)
            tier = "in memory" if in_memory else "checkpoint"
            notes += [f"{tier} refused: {line}" for line in damaged or [str(error)]]
            if damaged and left:
                order.append((step, in_memory, name))
    return None, notes


# ---- saves in memory -------------------------------------------------------------------------------------------------


def _saves_in_memory(
    home: Path, places: RankTopology, group: HostGroup
) -> tuple[dict[tuple[int, str], _Save], list[str]]:
    """Return saves by (step, attempt), and notes on damaged descriptions, on rank 0 only.

    The files are not read: `load` verifies what it uses, and a large state is not read twice.
    """
    rank = get_rank(group)
    intact, errors = memory_slot.read_all(home) if places.first_on_host(rank) == rank else ([], [])
    found = [(record.model_dump(mode="json"), str(folder)) for record, folder in intact]
    saves: dict[tuple[int, str], _Save] = defaultdict(_Save)
    notes: list[str] = []
    for holder, (slots, damaged) in enumerate(gather((found, [str(error) for error in errors]), group)):
        notes += [f"in memory refused: {error}" for error in damaged]
        for values, folder in slots:
            record = SlotRecord.model_validate(values)
            save = saves[record.save]
            save.records[record.rank] = record
            save.holders[record.rank].append((holder, folder))
    return saves, notes


def _drop_damaged(save: _Save | None, places: RankTopology, group: HostGroup) -> tuple[list[str], bool]:
    """Verify every byte of a save's copies, and drop the damaged ones. Ranks of a host share the work.

    Args:
        save: the save on rank 0; ignored on other ranks.

    Returns:
        A line for each damaged copy, and whether a copy is left. Equal on all ranks.
    """
    rank, copies = get_rank(group), save.holders if save else {}
    every = [(owner, holder, path) for owner, held in copies.items() for holder, path in held]
    every = broadcast(every, group)
    on_host = [copy for copy in every if places.hosts[copy[1]] == places.hosts[rank]]
    local = [r for r, host in enumerate(places.hosts) if host == places.hosts[rank]]
    damaged = []
    for owner, holder, path in on_host[local.index(rank) :: len(local)]:
        try:
            check_part(Path(path), memory_slot.read(Path(path)).part)
        except (CheckpointError, FileNotFoundError) as error:
            damaged.append((owner, holder, path, str(error)))
    found = [copy for copies in all_gather(damaged, group) for copy in copies]
    if save:
        for owner, holder, path, _ in found:
            save.holders[owner].remove((holder, path))
            if not save.holders[owner]:
                del save.records[owner]
    return [line for *_, line in found], len(found) < len(every)


def _load_from_memory(
    home: Path, places: RankTopology, save: _Save | None, state: State, group: HostGroup, model: dict[str, Any] | None
) -> dict[str, Any]:
    """Assemble a save on each host and load it.

    Args:
        save: the save on rank 0; ignored on other ranks.

    Raises:
        CheckpointError: on every rank: a part is missing, or loading failed (see `load`).
    """
    rank = get_rank(group)
    common = broadcast(_prepare(save or _Save()) if rank == 0 else None, group)
    if "error" in common:
        raise CheckpointError(common["error"])
    records = [SlotRecord.model_validate(values) for values in common["records"]]
    try:
        manifest = merge(records[0].step, records[0].extra, [record.part for record in records])
    except CheckpointError as error:  # on every rank, as all have the same records
        raise CheckpointError(f"step {records[0].step}: {error}") from None
    holders = {file_name(int(owner)): copies for owner, copies in common["holders"].items()}
    folder = home / f"restoring-{common['token']}"
    try:
        files = _collect_files(folder, places, sorted(touched(manifest, state)), holders, group)
        return _load(home, state, group=group, model=model, manifest=manifest, files=files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(save: _Save) -> dict[str, Any]:
    """Return, on rank 0, what all ranks must know of a save, or the reason why it is unusable."""
    some = next(iter(save.records.values()))
    if lost := sorted(set(range(some.world_size)) - save.records.keys()):
        which = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of {some.world_size}"
        return {"error": f"step {some.step}: no node has the part of {which}."}
    records = [record.model_dump(mode="json") for _, record in sorted(save.records.items())]
    return {"records": records, "holders": save.holders, "token": secrets.token_hex(4)}


def _collect_files(
    folder: Path, places: RankTopology, needed: list[str], holders: dict[str, list[tuple[int, str]]], group: HostGroup
) -> dict[str, Path]:
    """Return the paths of the needed files on this host; those that only other hosts have are received into ``folder``.

    Args:
        needed: by this rank. All ranks of a host use one copy.

    Raises:
        CheckpointError: on every rank: a file could not be read, or this host has no space for it.
    """
    rank = get_rank(group)
    every = all_gather(needed, group)
    wanted: dict[int, set[str]] = defaultdict(set)  # files needed on a host, by its first rank
    for asking, files in enumerate(every):
        wanted[places.first_on_host(asking)].update(files)
    found, problems = {}, []
    for first, files in sorted(wanted.items()):
        for file in sorted(files):
            near = [path for holder, path in holders[file] if places.hosts[holder] == places.hosts[first]]
            holder, path = holders[file][0]
            if places.first_on_host(rank) == first:
                found[file] = (Path(near[0]) if near else folder) / file
            if near:
                continue
            try:
                if rank == holder:
                    _send(Path(path) / file, first, group)
                elif rank == first:
                    _receive(folder / file, holder, group)
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
