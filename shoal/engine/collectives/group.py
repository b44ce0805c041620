"""Groups of communicating ranks, with shared memory on one host or torch's backend as transport."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.pending import DryTransport, Pending, Then, Transport
from shoal.engine.collectives.shm.progress import Progress
from shoal.engine.collectives.shm.region import Region, host_identity
from shoal.engine.collectives.shm.transport import SharedGroup

T = TypeVar("T")
_groups: weakref.WeakSet[Group] = weakref.WeakSet()  # all groups of this process


class ThrottledLink:
    """Simulated outgoing link of a rank with limited bandwidth, shared by everything it sends.

    Ranks of one host communicate with their compute cores, so communication cannot overlap computation. On this link
    data is in flight while the cores compute, for a time proportional to its size; waiting for it sleeps.
    """

    def __init__(self, rate: float):
        self.rate = rate  # bytes per second
        self._free = 0.0  # completion time of everything sent so far, on the monotonic clock

    @staticmethod
    def from_gbs(gbs: float) -> ThrottledLink | None:
        """Return a link of ``gbs`` GB/s; None for 0, which disables the simulation."""
        return ThrottledLink(1e9 * gbs) if gbs else None

    def send(self, size: float) -> None:
        """Queue ``size`` bytes."""
        self._free = max(self._free, time.monotonic()) + size / self.rate

    def carry(self, work: Pending) -> Pending:
        """Return the collective, delayed until the bytes queued last have been sent."""
        through = self._free
        return Then(work, lambda: time.sleep(max(0.0, through - time.monotonic())))


class Group:
    """Group of ranks that communicate.

    Attributes:
        ranks: global ranks of the group, in order.
        backend: torch's process group (gloo or NCCL); a dry run has none.
        shared: transport that tensors take instead of the backend: shared memory of CPU ranks on one host, or a staged
            one (`shoal.engine.collectives.staged`); else None.
        sent: bytes sent by this rank, by kind of collective (see `count`).
        calls: number of collectives started, by kind and bytes of the input tensor.
        meanwhile: called between the start of an exchange of rows and the wait for it (`exchange_rows`).
        is_dry_run: whether the other ranks do not exist (dry run); their data is then missing.
    """

    backend: dist.ProcessGroup

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        backend: dist.ProcessGroup | None = None,
        shared: Transport | None = None,
        link: ThrottledLink | None = None,
    ):
        self.ranks, self._rank, self.shared, self.link = list(ranks), rank, shared, link
        self.is_dry_run = isinstance(shared, DryTransport)
        self.sent: Counter[str] = Counter()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.meanwhile: Callable[[], object] = lambda: None
        if backend is not None:
            self.backend = backend
            _groups.add(self)

    @staticmethod
    def from_backend(backend: dist.ProcessGroup) -> Group:
        """Return a group that communicates through a process group of torch alone."""
        return Group(dist.get_process_group_ranks(backend), backend.rank(), backend)

    def count(self, kind: str, x: Tensor, times: float) -> None:
        """Record a collective that sends each byte of ``x`` ``times`` times.

        The factor assumes a bandwidth-optimal algorithm: (N-1)/N of the full tensor for a gather or scatter, and twice
        that for an all-reduce (Chan et al. 2007, "Collective communication: theory, practice, and experience").
        """
        size = x.numel() * x.element_size()
        self.sent[kind] += size * times  # type: ignore[assignment]  # typeshed's Counter has only integers
        self.calls[kind, size] += 1
        if self.link is not None:
            self.link.send(size * times)

    def throttled(self, work: Pending) -> Pending:
        """Return the last counted collective, delayed by the group's `ThrottledLink` if it has one."""
        return work if self.link is None else self.link.carry(work)

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._rank


def leave_groups() -> None:
    """Release the backend and shared memory of every group; none of them may be used afterwards.

    A group can outlive its world in an autograd graph whose backward never ran, and each gloo group has a thread that
    wakes a hundred times per second while references to it exist.
    """
    for group in list(_groups):
        del group.backend, group.shared
    _groups.clear()
    local_progress.cache_clear()


def publish_host(device: torch.device) -> None:
    """Publish this rank's host to the other ranks of the world, without waiting for them.

    Args:
        device: where the exchanged tensors are.
    """
    if device.type == "cpu" and dist.get_backend() == "gloo":
        _store().set(f"shoal/host/{dist.get_rank()}", host_identity() or "")


@cache
def local_progress(device: torch.device) -> Progress | None:
    """Return the shared-memory progress of a world whose ranks exchange tensors of the CPUs of one host, else None.

    Decided per world, not per group: shared memory makes no progress while a rank waits for the network, so mixing both
    can deadlock. For the same reason all groups share one instance: a wait on any operation advances all of them.
    Blocks until every rank has called `publish_host`.
    """
    if device.type != "cpu" or dist.get_backend() != "gloo":
        return None
    hosts = {_store().get(f"shoal/host/{rank}").decode() for rank in range(dist.get_world_size())}
    if len(hosts) > 1 or hosts == {""}:
        return None
    return Progress(_timeout().total_seconds())


def _timeout() -> timedelta:
    """Return the timeout of the world's collectives, of which every world has gloo's (`init_world`)."""
    return world()._get_backend(torch.device("cpu")).options._timeout


def create_backend(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group of torch with the world's timeout, which torch does not pass on. Its ranks call this."""
    return dist.new_group(list(ranks), _timeout(), use_local_synchronization=True)


def world() -> dist.ProcessGroup:
    """Return the default process group of all ranks, created by `shoal.engine.device.init_world`."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _store() -> dist.Store:
    return world().get_group_store()


def create_shared(backend: dist.ProcessGroup, progress: Progress) -> SharedGroup | None:
    """Create shared memory for a group; return None on all ranks if one cannot map it. Collective."""
    ranks, index = dist.get_process_group_ranks(backend), backend.rank()
    layout = SharedGroup.layout(len(ranks))
    return map_region(backend, *layout, lambda file, region: SharedGroup(region, ranks, index, progress))


def allocate(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group | None, *, one: bool = False
) -> Tensor:
    """Allocate flat zeros, in memory shared by the group if possible. Collective; ``numel`` must be equal on all ranks.

    In shared memory ranks read each other's buffers in place, so collectives on the full buffer need no copy.

    Args:
        one: use the same memory for all ranks if they share any. For values equal on all ranks, of which each rank
            writes a part, with no reads until all ranks have gathered it.
    """
    mine = None
    if group is not None and isinstance(shared := group.shared, SharedGroup) and numel:
        rows = 1 if one else shared.size
        size = shared.common_bytes(numel, dtype, rows)
        mine = map_region(group.backend, 0, size, lambda file, region: shared.map_common(region, numel, dtype, rows))
    return torch.zeros(numel, dtype=dtype, device=device) if mine is None else mine


def map_region(backend: dist.ProcessGroup, counters: int, size: int, use: Callable[[int, Region], T]) -> T | None:
    """Create a shared region and map it on each rank of a group before any of them returns.

    Args:
        use: builds the result from the region's file, which is closed afterwards, and the region.

    Returns:
        The result of ``use``; None on all ranks if one of them cannot map the region.
    """
    ranks, index = dist.get_process_group_ranks(backend), backend.rank()
    file, where = -1, torch.zeros(2, dtype=torch.int64)
    if index == 0:
        with suppress(OSError):  # the -1 informs the other ranks
            file = Region.create(counters, size)
        where[:] = torch.tensor([os.getpid(), file])
    dist.broadcast(where, ranks[0], group=backend)
    made = None
    with suppress(OSError):  # sandboxed or out of memory: all ranks use the backend
        if where[1] >= 0:
            if index > 0:
                file = os.open(f"/proc/{where[0]}/fd/{where[1]}", os.O_RDWR)
            made = use(file, Region(file, counters, size))
    all_have = torch.tensor([made is not None], dtype=torch.int32)
    dist.all_reduce(all_have, dist.ReduceOp.MIN, group=backend)  # afterwards the creator's file is no longer needed
    if file >= 0:
        os.close(file)
    return made if all_have else None
