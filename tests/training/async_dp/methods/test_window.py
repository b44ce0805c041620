"""What ranks share without waiting for each other: a queue of tickets, and push-sum numbers on their way."""

import gc
import os
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.shm import window
from shoal.engine.collectives.shm.window import Window
from shoal.training.async_dp.methods.gossip import Push
from shoal.training.async_dp.methods.queue import Queue
from shoal.training.async_dp.methods.wagma import GroupAverage


def world() -> Group:
    return Group.from_backend(dist.group.WORLD)


class Numbers:
    """Flat weights that belong to no model."""

    def __init__(self, values: torch.Tensor):
        self.weights, self.numel = [values[:5].clone(), values[5:].clone()], values.numel()

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.split([weights.numel() for weights in self.weights]))


# ---- the memory ------------------------------------------------------------------------------------------------------


def elsewhere(there: str | None) -> str:
    """Rank 1 tells that it is on another host, or where there is no such memory."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(window, "host_identity", lambda: there)
        with pytest.raises(UsageError) as error:
            Window(world(), 1, 64)
    return str(error.value)


@pytest.mark.parametrize("there", ["another host", None])
def test_ranks_that_cannot_share_memory_are_all_told(there, pool):
    for said in pool.run(elsewhere, 2, there):
        assert "ranks [0, 1] cannot share memory" in said and "use a parallel.sync that communicates" in said


def test_a_window_that_is_gone_has_closed_its_file():
    own = Window(None, 1, 64)
    file = own._file
    os.fstat(file)
    del own
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)


# ---- the queue -------------------------------------------------------------------------------------------------------


def take_all(common: bool, stop_after: int) -> tuple[list[tuple[int, int]], int]:
    queue = Queue(Window(world(), 16, 64), common=common)
    me = dist.get_rank()
    if me == 0:
        queue.start(3, 20)
    dist.barrier()
    mine = []
    while (ticket := queue.take(me)) is not None:
        mine.append(tuple(ticket))
        time.sleep(0.003 if me == 1 else 0)
        if len(mine) == stop_after and me == 0:
            queue.stop()
    dist.barrier()
    return mine, queue.limit


@pytest.mark.parametrize("stop_after", [0, 4])
@pytest.mark.parametrize("common", [False, True])
def test_every_ticket_before_the_limit_is_taken_once_and_none_after_it(common, stop_after, pool):
    results = pool.run(take_all, 3, common, stop_after)
    limit = results[0][1]
    assert limit == 20 if not stop_after else 3 < limit <= 20
    taken = [ticket for mine, _ in results for ticket in mine]
    assert sorted(taken) == [(step, slot) for step in range(3, limit) for slot in range(3)]
    if not common:
        assert all(slot == rank for rank, (mine, _) in enumerate(results) for _, slot in mine)
    elif not stop_after:
        assert len(results[1][0]) < len(results[0][0])  # who is slow takes less


# ---- push-sum --------------------------------------------------------------------------------------------------------


def push_sum(late: int, steps: int) -> dict[str, object]:
    me = dist.get_rank()
    flat = Numbers(torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(me)))
    node = Push(Window(world(), 64, 64 * 1024), flat, None, staleness=late)
    node.start(0)
    first = torch.cat(node.x).clone()
    dist.barrier()
    uneven = 0.0
    for step in range(steps):
        time.sleep(random.Random(10 * me + step).random() * 2e-3 * (1 + 3 * (me == 1)))
        node.gossip(step)
        uneven = max(uneven, abs(node.w - 1))
    dist.barrier()
    inside = sum(torch.cat(inbox) for inbox in node.inboxes[me])
    mass, weight = torch.cat(node.x) + inside, node.w + float(node.inbox_w[me].sum())
    z = torch.cat(flat.weights).clone()
    dist.barrier()
    node.settle(world())
    return {"first": first, "mass": mass, "weight": weight, "z": z, "uneven": uneven,
            "settled": torch.cat(flat.weights)}


@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (4, 0), (4, 3), (3, 2)])
def test_push_sum_keeps_its_mass_and_comes_to_the_mean(ranks, late, pool):
    found = pool.run(push_sum, ranks, late, 40)
    mean = torch.stack([f["first"] for f in found]).mean(0)
    assert torch.allclose(torch.stack([f["mass"] for f in found]).sum(0), ranks * mean, rtol=0, atol=1e-12)
    assert sum(f["weight"] for f in found) == pytest.approx(ranks, abs=1e-12)
    for f in found:
        assert torch.allclose(f["z"], mean, rtol=0, atol=1e-4)
        assert torch.allclose(f["settled"], mean, rtol=0, atol=1e-12)
    assert late or all(f["uneven"] == 0 for f in found)  # in step, all weights stay 1


def push_sum_without(dead: int, last: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank takes no part after some steps, and the others see that some ms apart. This rank's share of all x before
    and after."""
    me, n = dist.get_rank(), dist.get_world_size()
    flat = Numbers(torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(me)))
    window = Window(world(), 64, 64 * 1024)
    node = Push(window, flat, None, staleness=0)
    node.start(0)
    first = torch.cat(node.x).clone()
    dist.barrier()
    ended: list[float] = []

    def alive(index: int) -> bool:
        if index != dead or window.get(dead) < last:
            return True
        if not ended:
            ended.append(time.monotonic())
        return time.monotonic() - ended[0] < 4e-3 * ((me + seed) % n)

    window.alive = alive
    deadline, until = time.monotonic() + 20, window.until

    def in_time(there: Callable[[], bool]) -> None:
        until(lambda: there() or time.monotonic() > deadline)
        assert time.monotonic() < deadline, f"rank {me} waits for ever"

    window.until = in_time
    for step in range(last if me == dead else 20):
        time.sleep(random.Random(10 * me + step + seed).random() * 1e-3 * (1 + 3 * (me == 2)))
        node.gossip(step)
    dist.barrier()
    return first, torch.cat(node.x) + sum(torch.cat(inbox) for inbox in node.inboxes[me])


@pytest.mark.parametrize("ranks", [3, 4])
def test_nobody_waits_for_ever_where_a_death_is_seen_in_different_steps(ranks, pool):
    for seed in range(8):
        found = pool.run(push_sum_without, ranks, 1, 3 + seed % 3, seed)
        before, after = (torch.stack(shares).sum(0) for shares in zip(*found, strict=True))
        assert torch.allclose(before, after, rtol=0, atol=1e-12)


# ---- averages over all -----------------------------------------------------------------------------------------------


def averaged(every: int, steps: int) -> list[torch.Tensor]:
    """This rank's weights after each global step; rank 1 takes its time to read in these."""
    me = dist.get_rank()
    random = torch.Generator().manual_seed(me)
    flat = Numbers(torch.randn(9, dtype=torch.float64, generator=random))

    class Noise:
        def step(self, rate: float) -> None:
            for weights in flat.weights:
                weights += torch.randn(weights.shape, dtype=torch.float64, generator=random)

    window = Window(world(), 64, 64 * 1024)
    node = GroupAverage(window, flat, Noise(), size=2, staleness=3, global_every=every)
    node.start(2)
    dist.barrier()
    read, found = node._read, []

    def slowly(member: int, wanted: int) -> object:
        if me == 1 and wanted % every == 0:
            time.sleep(0.02)
        return read(member, wanted)

    node._read = slowly
    for step in range(2, 2 + steps):
        node.update(step, 0.1, 1)
        if (step + 1) % every == 0:
            found.append(torch.cat(flat.weights).clone())
    dist.barrier()
    return found


@pytest.mark.parametrize(("ranks", "every"), [(3, 1), (4, 2), (3, 4)])
def test_after_an_average_over_all_they_are_equal_bit_for_bit(ranks, every, pool):
    found = pool.run(averaged, ranks, every, 16)
    assert all(len(weights) == len(found[0]) >= 4 for weights in found)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


def lonely() -> None:
    window = Window(world(), 4, 64)
    window.set(dist.get_rank(), 7)
    dist.barrier()
    assert [window.get(rank) for rank in range(3)] == [7, 7, 7] and window.living() == [0, 1, 2]
    with window.lock(0), window.lock(1):
        shared = window.tensor(1, torch.int64)
    for _ in range(200):
        with window.lock(2):
            shared += 1
    dist.barrier()
    assert shared.item() == 600


def test_locks_keep_the_ranks_of_a_window_apart(pool):
    pool.run(lonely, 3)
