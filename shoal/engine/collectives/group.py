"""A group of ranks that communicate, and the transport between them: shared memory on one host, else the backend."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.pending import Pending, Transport
from shoal.engine.collectives.shm.progress import Progress
from shoal.engine.collectives.shm.region import Region, host_identity
from shoal.engine.collectives.shm.transport import SharedGroup
from shoal.engine.collectives.throttle import ThrottledLink

T = TypeVar("T")
_groups: weakref.WeakSet[Group] = weakref.WeakSet()  # all of this process
_progress: list[Progress | None] = []  # of the world, once somebody has asked for it


class Group:
    """Ranks that communicate.

    Attributes:
        backend: torch's process group (gloo or NCCL).
        shared: memory that CPU ranks of one host share, or None; what goes through it never meets the backend.
        sent: bytes that this rank has sent, by kind of collective (see `count`).
        calls: how often each was started, by kind and the bytes of the tensor that it takes.
        link: the network that is imitated between the ranks, or None.
        is_dry_run: whether the other ranks are not there (a dry run); what they would give is then left out.
    """

    is_dry_run = False
    backend: dist.ProcessGroup

    def __init__(
        self, backend: dist.ProcessGroup | None, shared: Transport | None = None, link: ThrottledLink | None = None
    ):
        self.shared, self.link = shared, link
        self.sent: Counter[str] = Counter()
        self.calls: Counter[tuple[str, int]] = Counter()
        if backend is not None:  # a group of a dry run has none, and nothing to leave
            self.backend = backend
            _groups.add(self)

    def count(self, kind: str, x: Tensor, times: float) -> None:
        """Note that a collective sends each of ``x``'s bytes so many times.

        By an algorithm that sends no more than it must: of what a gather or a scatter makes or takes whole,
        (N-1)/N, and twice that for an all-reduce (Chan et al. 2007, "Collective communication: theory, practice, and
        experience").
        """
        size = x.numel() * x.element_size()
        self.sent[kind] += size * times  # type: ignore[assignment]  # typeshed's Counter has only whole numbers
        self.calls[kind, size] += 1
        if self.link is not None:
            self.link.send(size * times)

    def throttled(self, work: Pending) -> Pending:
        """The collective that was counted last, as it was started; with a `ThrottledLink`, no faster than it allows."""
        return work if self.link is None else self.link.carry(work)

    def size(self) -> int:
        """Number of ranks."""
        return self.backend.size()

    def rank(self) -> int:
        """This process's place among them."""
        return self.backend.rank()

    @property
    def ranks(self) -> list[int]:
        """Their global ranks, in order."""
        return dist.get_process_group_ranks(self.backend)


def leave_groups() -> None:
    """Let go of every group's backend and shared memory; no group of this process is used again.

    A group may outlive its world, in the graph of a backward pass that was never made. Each of gloo's has a thread that
    wakes a hundred times a second for as long as somebody holds it.
    """
    for group in list(_groups):
        del group.backend, group.shared
    _groups.clear()
    _progress.clear()


def publish_host(device: torch.device) -> None:
    """Tell the other ranks of the world where this one runs, without waiting for them."""
    if device.type == "cpu" and dist.get_backend() == "gloo":
        _store().set(f"shoal/host/{dist.get_rank()}", host_identity() or "")


def local_progress(device: torch.device) -> Progress | None:
    """For the groups of a world whose ranks all compute on the CPUs of one host; None in any other world.

    It is the world that counts and not the single group: nothing moves in shared memory while a rank waits for the
    network, so that a run which uses both could wait in a circle. For the same reason there is one for all groups:
    whoever waits anywhere drives whatever this process has under way. Waits until every rank has called `publish_host`.
    """
    if not _progress:
        _progress.append(_local_progress(device))
    return _progress[0]


def _local_progress(device: torch.device) -> Progress | None:
    if device.type != "cpu" or dist.get_backend() != "gloo":
        return None
    hosts = {_store().get(f"shoal/host/{rank}").decode() for rank in range(dist.get_world_size())}
    if len(hosts) > 1 or hosts == {""}:
        return None
    timeout = world()._get_backend(device).options._timeout
    return Progress(timeout.total_seconds())


def world() -> dist.ProcessGroup:
    """The default process group, of all ranks; there is one from `shoal.engine.device.init_world` on."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _store() -> dist.Store:
    return world().get_group_store()


def create_shared(backend: dist.ProcessGroup, progress: Progress) -> SharedGroup | None:
    """Give the ranks of a group memory to share; None on all of them if one cannot map it. To be called by all."""
    ranks, index = dist.get_process_group_ranks(backend), backend.rank()
    layout = SharedGroup.layout(len(ranks))
    return map_region(backend, *layout, lambda file, region: SharedGroup(region, ranks, index, progress))


def allocate(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group | None, *, one: bool = False
) -> Tensor:
    """Flat zeros. Where the group's ranks share memory they read each other's in place, so that collectives on the
    whole of it copy nothing into a ring. To be called by all of the group, for equally many numbers.

    Args:
        one: they are the same memory to all ranks, where ranks share any. It is for numbers that are equal on all, of
            which each rank writes a part, while none reads, before all gather them.
    """
    mine = None
    if group is not None and isinstance(shared := group.shared, SharedGroup) and numel:
        rows = 1 if one else shared.size
        size = shared.common_bytes(numel, dtype, rows)
        mine = map_region(group.backend, 0, size, lambda file, region: shared.map_common(region, numel, dtype, rows))
    return torch.zeros(numel, dtype=dtype, device=device) if mine is None else mine


def map_region(backend: dist.ProcessGroup, counters: int, size: int, use: Callable[[int, Region], T]) -> T | None:
    """Have each rank of a group make something of one new region, before any of them returns.

    Args:
        use: from the region's file, which is closed after it, and the region.

    Returns:
        What this rank made; None on all if one of them cannot map the region.
    """
    ranks, index = dist.get_process_group_ranks(backend), backend.rank()
    file, where = -1, torch.zeros(2, dtype=torch.int64)
    if index == 0:
        with suppress(OSError):  # the others learn it from the -1
            file = Region.create(counters, size)
        where[:] = torch.tensor([os.getpid(), file])
    dist.broadcast(where, ranks[0], group=backend)
    made = None
    with suppress(OSError):  # a sandbox, or no memory: all take the backend
        if where[1] >= 0:
            if index > 0:
                file = os.open(f"/proc/{where[0]}/fd/{where[1]}", os.O_RDWR)
            made = use(file, Region(file, counters, size))
    all_have = torch.tensor([made is not None], dtype=torch.int32)
    dist.all_reduce(all_have, dist.ReduceOp.MIN, group=backend)  # after it, nobody needs the creator's file
    if file >= 0:
        os.close(file)
    return made if all_have else None
