"""How shared memory ends: with a rank that dies, leaves or never comes, and where there is none or two hosts."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from shoal.engine.collectives import ops
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.shm import region
from shoal.engine.collectives.shm.progress import Lane, Operation, Progress
from shoal.launch.worker_pool import Pool, RankError
from shoal.spec.layout import Layout
from tests.engine.collectives.test_transport import world


def killed_in_the_middle(large: bool) -> None:
    group, x = world("auto"), torch.ones(10**7 if large else 10)
    ops.all_reduce(x, group)
    if dist.get_rank() == 1:
        work = ops.start_all_reduce(x, group) if large else None
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    ops.all_reduce(x, group)


def open_regions() -> int:
    """Regions that this process and all that it started have mapped."""
    found, here = 0, psutil.Process()
    for process in (here, *here.children(recursive=True)):
        try:
            found += sum("memfd:shoal" in each.path for each in process.memory_maps())
        except psutil.Error:
            continue
    return found


def named() -> set[str]:
    """What lies in the memory's file system, but for the states of runs, which other tests make meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("shoal-")}


@pytest.mark.parametrize("large", [False, True], ids=["before it", "in it"])
def test_the_others_end_with_an_error_when_a_rank_is_killed(large: bool) -> None:
    before, mapped = named(), open_regions()
    with Pool(3) as own:
        with pytest.raises(RankError) as error:
            own.run(killed_in_the_middle, 3, large)
        causes = dict(error.value.failures)
        assert "SIGKILL" in causes[1]
        for rank in (0, 2):
            assert "PeerLost" in causes[rank] and "rank 1" in causes[rank] and "has ended" in causes[rank]
    assert named() == before
    assert open_regions() == mapped


def leaves_early() -> None:
    group = world("auto")
    if dist.get_rank() == 1:
        raise ArithmeticError("the real cause")
    ops.all_reduce(torch.ones(3), group)


def test_the_others_end_with_an_error_when_a_rank_raises(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="the real cause") as error:
        pool.run(leaves_early, 2)
    assert "has left the group" in dict(error.value.failures)[0]
    assert time.monotonic() - start < 20  # far below the timeout


def never_comes(rank: int) -> str:
    group = world("auto")
    group.shared.progress.timeout = 0.3
    if dist.get_rank() == rank:
        time.sleep(1.0)
        return ""
    with pytest.raises(TimeoutError) as error:
        ops.all_reduce(torch.ones(3), group)
    return str(error.value)


def test_waiting_ends_at_the_timeout_and_names_the_rank(pool: Pool) -> None:
    assert "waits for rank 2" in pool.run(never_comes, 3, 2)[0]


def without_memory(where: str) -> tuple[bool, float]:
    """One rank cannot make or map the region."""

    def refuse(*_: object) -> int:
        raise OSError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if where == "make" and dist.get_rank() == 0:
            patch.setattr(region.Region, "create", refuse)
        if where == "map" and dist.get_rank() == 1:
            patch.setattr(region.mmap, "mmap", refuse)
        group = Mesh(Layout(tp=2), dist.get_rank()).group("tp")
    return group.shared is None, ops.all_reduce(torch.ones(1), group).item()


@pytest.mark.parametrize("where", ["make", "map"])
def test_without_memory_all_take_the_backend(pool: Pool, where: str) -> None:
    assert pool.run(without_memory, 2, where) == [(True, 2.0)] * 2


def outside_first() -> float | None:
    """The middle stage is outside of the first group that the others make, and goes on to something else."""
    made = Mesh(Layout(pp=3), dist.get_rank())
    ends = made.group("pp:0,2")
    if ends is None:
        dist.recv(torch.empty(1), 0)
        return None
    if dist.get_rank() == 0:
        dist.send(torch.empty(1), 1)
    return ops.all_reduce(torch.ones(1), ends).item()


def test_a_group_waits_for_its_members_alone(pool: Pool) -> None:
    assert pool.run(outside_first, 3) == [2.0, None, 2.0]


def on_two_hosts() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.engine.collectives.group.host_identity", lambda: f"host {dist.get_rank() // 2}")
        return Mesh(Layout(dp=2, tp=2), dist.get_rank()).group("tp").shared is None


def test_a_world_on_two_hosts_takes_the_backend(pool: Pool) -> None:
    assert all(pool.run(on_two_hosts, 4))


class Ended:
    """A group of two ranks, of which the other has ended."""

    ranks = (0, 1)

    def describe_end(self, rank: int) -> str:
        return f"rank {rank} has ended"


def test_what_a_rank_did_just_before_it_ended_completes_an_operation() -> None:
    group, progress = Ended(), Progress(timeout=60.0)
    operation = Operation("a sum", progress)
    lane = Lane(group)
    progress.add(lane, operation, iter([1]))  # waits for rank 1 at first, and is over when looked at again
    progress._check_awaited(operation, waited=0.1)
    assert operation.is_completed()
    assert not progress.lanes
