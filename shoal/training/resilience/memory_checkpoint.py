"""The newest state in host memory: this node's, and a copy in another's (Wang et al. 2023, "Gemini", section 4).

Every few steps each rank copies what it would save to disk straight into a mapped file of its node's tmpfs; that copy
is all that the step waits for. A background thread then checksums it and sends it to a rank of the next node, in a ring
of nodes. Of two slots, one always holds the last state that all ranks have whole, on both nodes: a slot is written
again only when every rank has finished the other.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.engine.checkpoint.write import SavePlan, Staged, State, header_of, lay_out, part_of
from shoal.engine.collectives.json_collectives import Group, broadcast, gather, rank_of, size_of
from shoal.training.resilience import memory_slot
from shoal.training.resilience.host_memory_dir import check_room, claim, make_run_dir, release, remove_orphans
from shoal.training.resilience.memory_slot import MemorySlot, SlotRecord

CHUNK = 16 << 20
"""Bytes of one message: between two of them, other traffic gets its turn."""


@dataclass(frozen=True)
class RankTopology:
    """Where each rank is: the name of its host, and the index of its node."""

    hosts: list[str]
    nodes: list[int]

    @staticmethod
    def of(group: Group, node_ranks: int = 0) -> RankTopology:
        """Those of a group's ranks; collective.

        Args:
            node_ranks: ranks of a node; 0 takes each host as one.
        """
        hosts = broadcast(gather(socket.gethostname(), group), group)
        names = list(dict.fromkeys(hosts))
        return RankTopology(hosts, [r // node_ranks if node_ranks else names.index(h) for r, h in enumerate(hosts)])

    def first_here(self, rank: int) -> int:
        """The first rank on the same host."""
        return self.hosts.index(self.hosts[rank])

    def receiver(self, rank: int) -> int | None:
        """The rank, on the next node of the ring, that keeps this one's copy; None with a single node."""
        ring = sorted(set(self.nodes))
        if len(ring) == 1:
            return None
        here = [r for r, node in enumerate(self.nodes) if node == self.nodes[rank]]
        beyond = ring[(ring.index(self.nodes[rank]) + 1) % len(ring)]
        there = [r for r, node in enumerate(self.nodes) if node == beyond]
        return there[here.index(rank) % len(there)]

    def senders(self, rank: int) -> list[int]:
        """The ranks of which this one keeps a copy."""
        return [r for r in range(len(self.nodes)) if self.receiver(r) == rank]


class InMemoryCheckpointer:
    """Keeps the newest states of a run in host memory. All methods must be called on all ranks alike.

    Args:
        home: the run's folder in this host's memory (`shoal.training.resilience.host_memory_dir.run_dir`).
        group: a gloo group of all ranks that serves nothing else; None in a single process.
        node_ranks: see `RankTopology.of`.
        keep: the save (step, attempt) that this run resumes from: removed when there is something newer, and all else
            that earlier attempts left at once.
        report: called on rank 0 with messages.
    """

    def __init__(
        self,
        home: Path,
        run_folder: Path,
        *,
        group: Group,
        node_ranks: int = 0,
        keep: tuple[int, str] | None = None,
        report: Callable[[str], None] = print,
    ):
        self._home, self._group, self._report = home, group, report
        self._rank, self._world = rank_of(group), size_of(group)
        self.places = RankTopology.of(group, node_ranks)
        self.attempt: str = broadcast(secrets.token_hex(4), group)
        self._leads = self.places.first_here(self._rank) == self._rank
        if self._leads:
            make_run_dir(home)
            claim(home, run_folder)
            memory_slot.drop(home, self.attempt, keep)
            for line in remove_orphans(home):
                report(line)
        gather(None, group)  # the folder is there
        node = home / f"node-{self.places.nodes[self._rank]:05d}"
        ranks = [self._rank, *self.places.senders(self._rank)]
        self._slots = [
            {rank: MemorySlot(node / f"{self.attempt}-{rank:05d}-{i}", rank) for rank in ranks} for i in (0, 1)
        ]
        self._turn, self._first = 0, True
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._pending: Future[tuple[bool, str]] | None = None

    def prepare(self, state: State) -> None:
        """Require that the host has room for all that its ranks will keep, and take what the first save needs.

        Raises:
            UsageError: on the ranks of a host that has not.
        """
        plan = lay_out(state)
        sizes = broadcast(gather(plan.size, self._group), self._group)
        here = [r for r in range(self._world) if self.places.hosts[r] == self.places.hosts[self._rank]]
        check_room(self._home, 2 * sum(sizes[r] for rank in here for r in (rank, *self.places.senders(rank))))
        self._reserve(0, len(_header(plan)) + plan.size)

    def _reserve(self, turn: int, size: int) -> None:
        with contextlib.suppress(OSError):  # the save that needs it will tell
            self._slots[turn][self._rank].reserve(size)

    def save(self, step: int, state: State, extra: dict[str, Any]) -> float:
        """Keep a state; returns the seconds for which the caller was held up.

        Args:
            state: this rank's pieces; tensors may change as soon as this returns.
            extra: what else is needed to resume, as JSON values.
        """
        begin = time.perf_counter()
        self.wait()
        plan, slot = lay_out(state), self._slots[self._turn][self._rank]
        header = _header(plan)
        staged, problem = None, ""
        try:
            memory = slot.room(len(header) + plan.size)
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8) if header else 0
            staged = plan.copy(memory[len(header) :])
        except OSError as error:
            problem = f"rank {self._rank}: {error.strerror}"
        self._pending = self._executor.submit(self._keep, step, header, staged, json.dumps(extra), problem)
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until the state that was saved last is whole on all nodes; one that could not be kept is reported."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        whole, note = pending.result()
        if whole:
            self._turn = 1 - self._turn
        elif self._rank == 0:
            self._report(note)

    def forget(self, after: int) -> None:
        """Drop the states of later steps: the run has left that course."""
        self.wait()
        if self._leads:
            memory_slot.forget(self._home, after)
        gather(None, self._group)

    def close(self, *, keep: bool = False) -> None:
        """Wait, and give the memory back; ``keep`` leaves it for the next attempt."""
        self.wait()
        self._executor.shutdown()
        broadcast(gather(None, self._group), self._group)  # no rank writes any more
        if self._leads and not keep:
            release(self._home)

    # ---- in the background -------------------------------------------------------------------------------------------

    def _keep(self, step: int, header: bytes, staged: Staged | None, extra: str, problem: str) -> tuple[bool, str]:
        """Describe this rank's slot, and exchange copies. A rank that fails still takes part."""
        mine = self._slots[self._turn]
        described = b""
        if staged is not None:
            record = SlotRecord(
                attempt=self.attempt, step=step, rank=self._rank, world_size=self._world, extra=json.loads(extra),
                part=part_of(self._rank, header, staged),
            )
            described = memory_slot.encode(record)
            mine[self._rank].commit(described)
        size = len(header) + (staged.data.numel() if staged else 0)
        told = broadcast(gather([size, len(described), problem], self._group), self._group)
        problems = [p for _, _, p in told if p]
        if not problems and self.places.receiver(0) is not None:
            problems = self._exchange(mine, described, [(data, text) for data, text, _ in told])
        if problems:
            return False, f"step {step} could not be kept in memory: {'; '.join(problems)}"
        if self._first and self._leads:  # what the attempt before left is not needed any more
            memory_slot.drop(self._home, self.attempt)
        if self._first:
            self._reserve(1 - self._turn, size)
        self._first = False
        return True, ""

    def _exchange(self, mine: dict[int, MemorySlot], described: bytes, sizes: list[tuple[int, int]]) -> list[str]:
        """Send this rank's slot to the next node, and take in those of the node before. Returns what went wrong."""
        problem, into = "", {}
        try:
            for rank in self.places.senders(self._rank):
                into[rank] = (mine[rank].room(sizes[rank][0]), torch.empty(sizes[rank][1], dtype=torch.uint8))
        except OSError as error:
            problem = f"rank {self._rank}: {error.strerror}"
        if problems := [p for p in broadcast(gather(problem, self._group), self._group) if p]:
            return problems
        text = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        receiver = self.places.receiver(self._rank)
        data = mine[self._rank].written()
        works = [dist.isend(part, group=self._group, group_dst=receiver) for part in in_messages(data, text)]
        for rank, pair in into.items():
            works += [dist.irecv(part, group=self._group, group_src=rank) for part in in_messages(*pair)]
        for work in works:
            if work is not None:  # of a rank that sends to itself there is none
                work.wait()
        for rank, (_, text) in into.items():
            mine[rank].commit(text.numpy().tobytes())
        gather(None, self._group)
        return []


def _header(plan: SavePlan) -> bytes:
    """Of a rank's file; a rank that is primary for nothing has none."""
    return header_of(plan.slots) if plan.slots else b""


def in_messages(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Flat tensors in the views that are sent one by one; nothing of an empty one."""
    return [part for tensor in tensors if tensor.numel() for part in tensor.split(CHUNK)]
