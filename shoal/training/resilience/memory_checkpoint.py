"""Checkpoints in host memory, replicated on another node (Wang et al. 2023, "Gemini", section 4).

Every few steps each rank copies its state directly into a mapped file in its node's tmpfs; the step waits only for this
copy. A background thread then checksums it and sends it to a rank of the next node in a ring of nodes. One of two slots
always holds the last state that is complete for all ranks on both nodes: a slot is overwritten only after every rank
has finished the other.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.checkpoint.background import BackgroundSave
from shoal.engine.checkpoint.write import SavePlan, State, build_header, describe_part, plan_save
from shoal.engine.collectives.json_collectives import HostGroup, all_gather, gather, get_rank, get_size
from shoal.engine.streams import Mark, SideStream
from shoal.training.resilience import memory_slot
from shoal.training.resilience.host_memory_dir import (
    check_free_memory,
    claim_run_dir,
    make_run_dir,
    release,
    remove_orphans,
)
from shoal.training.resilience.memory_slot import MemorySlot, SlotRecord

CPU = torch.device("cpu")
ABANDON_SECONDS = 0.05  # for an exchange of copies after the loss of a rank: the state before is complete
CHUNK = 16 << 20
"""Bytes per message; other traffic can proceed between two messages."""
_left: list[MemorySlot] = []  # this process's own slots of an attempt that it has abandoned, for the next one


@dataclass(frozen=True)
class RankTopology:
    """Location of each rank: host name and node index; and a name for this meeting of the ranks, drawn by rank 0."""

    hosts: list[str]
    nodes: list[int]
    token: str

    @staticmethod
    def collect(group: HostGroup, node_ranks: int = 0) -> RankTopology:
        """Gather the topology of a group of nodes of ``node_ranks``; 0 treats each host as a node. Collective."""
        every = all_gather((socket.gethostname(), secrets.token_hex(4)), group)
        hosts = [host for host, _ in every]
        names = list(dict.fromkeys(hosts))
        nodes = [r // node_ranks if node_ranks else names.index(h) for r, h in enumerate(hosts)]
        return RankTopology(hosts, nodes, every[0][1])

    def first_on_host(self, rank: int) -> int:
        return self.hosts.index(self.hosts[rank])

    def receiver(self, rank: int) -> int | None:
        """Return the rank on the next node of the ring that keeps this rank's copy; None with a single node."""
        ring = sorted(set(self.nodes))
        if len(ring) == 1:
            return None
        own = [r for r, node in enumerate(self.nodes) if node == self.nodes[rank]]
        next_node = ring[(ring.index(self.nodes[rank]) + 1) % len(ring)]
        next_ranks = [r for r, node in enumerate(self.nodes) if node == next_node]
        return next_ranks[own.index(rank) % len(next_ranks)]

    def senders(self, rank: int) -> list[int]:
        """Return the ranks whose copies this rank keeps."""
        return [r for r in range(len(self.nodes)) if self.receiver(r) == rank]


class InMemoryCheckpointer:
    """Checkpointer to host memory. All ranks must call the same methods in the same order.

    Args:
        home: the run's directory in this host's memory (`shoal.training.resilience.host_memory_dir.run_dir`).
        group: separate gloo group of all ranks; None in a single process.
        state: what will be saved, for which memory is checked and reserved; None if that is not known yet.
        keep: save (step, attempt) that this run resumes from; removed after the next save. Other states of earlier
            attempts are removed immediately.

    Attributes:
        copied: see `shoal.engine.checkpoint.save.Checkpointer`.

    Raises:
        UsageError: on every rank: a host's memory cannot be used, or is too little for all its ranks.
    """

    def __init__(
        self,
        home: Path,
        run_folder: Path,
        *,
        group: HostGroup,
        places: RankTopology,
        state: State | None = None,
        keep: tuple[int, str] | None = None,
        device: torch.device = CPU,
        report: Callable[[str], None] = print,
    ):
        self._home, self._group, self._report = home, group, report
        self._rank, self._world = get_rank(group), get_size(group)
        self.places, self.attempt = places, places.token
        self._leads = self.places.first_on_host(self._rank) == self._rank
        problem = ""
        if self._leads:
            try:
                make_run_dir(home)
                claim_run_dir(home, run_folder)
            except UsageError as error:
                problem = str(error)
        node = home / f"node-{self.places.nodes[self._rank]:05d}"
        ranks = [self._rank, *self.places.senders(self._rank)]
        self._slots = [
            {
                rank: MemorySlot(node / f"{self.attempt}-{rank:05d}-{i}", rank, device if rank == self._rank else CPU)
                for rank in ranks
            }
            for i in (0, 1)
        ]
        self._take_over(keep)
        plan = plan_save(state or {})
        sizes = self._agree(plan.size, problem)
        if self._leads:  # now that all ranks have taken over theirs
            memory_slot.drop(home, self.attempt, keep)
            for line in remove_orphans(home):
                report(line)
        self._stream, self.copied = SideStream(device), Mark()
        self._turn, self._first = 0, True
        self._pending: BackgroundSave[tuple[bool, str]] | None = None
        if self._leads:
            own = [r for r in range(self._world) if self.places.first_on_host(r) == self._rank]
            try:
                check_free_memory(home, 2 * sum(sizes[r] for rank in own for r in (rank, *self.places.senders(rank))))
            except UsageError as error:
                problem = str(error)
        self._agree(0, problem)
        if state is not None:
            self._reserve(0, len(build_header(plan.slots)) + plan.size)

    def _agree(self, value: int, problem: str) -> list[int]:
        """Return the values of all ranks, or raise the first rank's error on every rank."""
        every = all_gather((value, problem), self._group)
        if found := [each for _, each in every if each]:
            raise UsageError(found[0])
        return [value for value, _ in every]

    def _take_over(self, keep: tuple[int, str] | None) -> None:
        """Take the slots of this process's attempt before, so that they are not allocated and page-locked again.

        The state ``keep`` is moved to the slot that the second save overwrites.
        """
        first = self._slots[0][self._rank]
        mine = [old for old in _left if old.device == first.device and old.file.name == first.file.name
                and old.folder.parent == first.folder.parent]  # fmt: skip
        _left.clear()
        kept = [old for old in mine if keep and old.save == keep]
        for turn, old in [*enumerate(old for old in mine if old not in kept), *((1, old) for old in kept)]:
            with contextlib.suppress(OSError):  # it is gone
                if old not in kept:
                    old.clear()
                old.move(self._slots[turn][self._rank].folder)
                self._slots[turn][self._rank] = old

    def _reserve(self, turn: int, size: int) -> None:
        """Allocate the memory of a slot before its save, and mark it as empty."""
        with contextlib.suppress(OSError):  # the save reports it
            self._slots[turn][self._rank].open(size)

    def save(self, step: int, state: State, extra: dict[str, Any]) -> float:
        """Save this rank's pieces and JSON values; return the seconds for which the caller was blocked.

        The tensors may change after the return, on CUDA by work that waits for `copied`.
        """
        begin = time.perf_counter()
        self.wait()
        plan, slot = plan_save(state), self._slots[self._turn][self._rank]
        header = build_header(plan.slots)
        data, problem = None, ""
        try:
            memory = slot.open(len(header) + plan.size)
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8) if header else 0
            data = memory[len(header) :]
            self.copied = self._stream.run(partial(plan.copy, data))
        except OSError as error:
            problem = f"rank {self._rank}: {error.strerror}"
        self._pending = BackgroundSave(
            self._keep, "memory", False, step, header, plan, data, self.copied, json.dumps(extra), problem
        )
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until the last saved state is complete on all nodes; report a failed save."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        complete, note = pending.result()
        if complete:
            self._turn = 1 - self._turn
        elif self._rank == 0:
            self._report(note)

    def forget(self, after: int) -> None:
        """Drop states newer than step ``after``."""
        self.wait()
        if self._leads:
            memory_slot.forget(self._home, after)
        gather(None, self._group)

    def close(self) -> None:
        """Wait for the last save and free the memory."""
        self.wait()
        all_gather(None, self._group)  # all ranks have stopped writing
        if self._leads:
            release(self._home)

    def abandon(self, *, reuse: bool = False) -> None:
        """Stop without the other ranks, one of which was lost; the saved states stay.

        The thread that exchanges copies may wait on (`BackgroundSave.leave`); it writes nothing more.

        Args:
            reuse: give this rank's slots to this process's next checkpointer.
        """
        if self._pending is not None:
            self._pending.leave(ABANDON_SECONDS)
        _left[:] = [each[self._rank] for each in self._slots] if reuse else []

    # ---- in the background -------------------------------------------------------------------------------------------

    def _keep(
        self, save: BackgroundSave[Any], step: int, header: bytes, plan: SavePlan, data: torch.Tensor | None,
        copied: Mark, extra: str, problem: str,
    ) -> tuple[bool, str]:  # fmt: skip
        """Commit this rank's slot and exchange copies. A rank that failed still participates."""
        copied.synchronize()
        plan.sources.clear()  # so that the exchange does not keep the state alive
        mine = self._slots[self._turn]
        description = b""
        if data is not None:
            record = SlotRecord(
                attempt=self.attempt, step=step, rank=self._rank, world_size=self._world, extra=json.loads(extra),
                part=describe_part(self._rank, header, plan, data),
            )
            description = memory_slot.encode(record)
            problem = self._commit(self._rank, description)
        size = len(header) + (0 if data is None else plan.size)
        with save.leavable():
            ranks = all_gather([size, len(description), problem], self._group)
        problems = [p for _, _, p in ranks if p]
        if not problems and self.places.receiver(0) is not None:
            problems = self._exchange(save, mine, description, [(data, text) for data, text, _ in ranks])
        if self._first and not problems:
            if self._leads:
                memory_slot.drop(self._home, self.attempt)  # the states of attempts before are obsolete
            self._reserve(1 - self._turn, size)
            self._first = False
        if problems:
            return False, f"step {step} could not be saved in memory: {'; '.join(problems)}"
        return True, ""

    def _exchange(
        self, save: BackgroundSave[Any], mine: dict[int, MemorySlot], description: bytes, sizes: list[tuple[int, int]]
    ) -> list[str]:
        """Send this rank's slot to the next node and receive the previous node's. Return problems."""
        problem, into = "", {}
        try:
            for rank in self.places.senders(self._rank):
                into[rank] = (mine[rank].open(sizes[rank][0]), torch.empty(sizes[rank][1], dtype=torch.uint8))
        except OSError as error:
            problem = f"rank {self._rank}: {error.strerror}"
        with save.leavable():
            every = all_gather(problem, self._group)
        if problems := [p for p in every if p]:
            return problems
        text = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        receiver = self.places.receiver(self._rank)
        own = split_messages(mine[self._rank].memory, text)
        with save.leavable():
            works = [dist.isend(part, group=self._group, group_dst=receiver) for part in own]
            for rank, pair in into.items():
                works += [dist.irecv(part, group=self._group, group_src=rank) for part in split_messages(*pair)]
            for work in works:
                if work is not None:  # None for a rank that sends to itself
                    work.wait()
        committed = [self._commit(rank, text.numpy().tobytes()) for rank, (_, text) in into.items()]
        problem = "; ".join(filter(None, committed))
        with save.leavable():
            every = all_gather(problem, self._group)
        return [p for p in every if p]

    def _commit(self, rank: int, description: bytes) -> str:
        """Complete a slot of this node; return a problem."""
        try:
            self._slots[self._turn][rank].commit(description)
        except OSError as error:
            return f"rank {self._rank}: {error.strerror}"
        return ""


def split_messages(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Split flat tensors into the views that are sent as messages; empty tensors give none."""
    return [part for tensor in tensors if tensor.numel() for part in tensor.split(CHUNK)]
