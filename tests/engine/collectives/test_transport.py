"""Collectives and transfers, the same tests for each transport: shared memory, the backend (gloo), and staged."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.collectives import ops
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.shm import transport
from shoal.engine.collectives.staged import StagedTransport
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

TYPES = {"auto": transport.SharedGroup, "backend": type(None), "staged": StagedTransport}
TRANSPORTS = list(TYPES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8]
SIZES = st.one_of(st.integers(0, 100), st.integers(0, 40_000), st.sampled_from([2**18, 2**18 + 1, 700_001]))

each = pytest.mark.parametrize("transport", TRANSPORTS)
both = pytest.mark.parametrize("transport", TRANSPORTS[:2])


def mesh(transport: str, **layout: int) -> Mesh:
    made = Mesh(Layout(**(layout or {"tp": dist.get_world_size()})), dist.get_rank(), transport=transport)
    for axis in ("tp", "dp"):
        group = made.group(axis)
        assert group is None or type(group.shared) is TYPES[transport]
    return made


def world(transport: str) -> Group:
    return mesh(transport).group("tp")


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums over 8 ranks are exact in every dtype."""
    return torch.randint(0, 8, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


# ---- every collective, dtype and size --------------------------------------------------------------------------


def collectives(transport: str, numels: list[int], dtype: torch.dtype) -> None:
    """All of them, one after another and several in flight."""
    group, n, rank = world(transport), dist.get_world_size(), dist.get_rank()
    for numel in numels:
        every = torch.stack([values(r, numel, dtype) for r in range(n)])
        total = every.any(0) if dtype == torch.bool else every.sum(0, dtype=dtype)
        summed, most = every[rank].clone(), every[rank].clone()
        if dtype != torch.bool:  # gloo has no sums of truth values
            ops.all_reduce(summed, group)
            assert torch.equal(summed, total)
            started = every[rank].clone()
            ops.start_all_reduce(started, group).wait()
            assert torch.equal(started, total)
            ops.all_reduce(most, group, dist.ReduceOp.MAX)
            assert torch.equal(most, every.amax(0))
        gathered = every.new_empty(n * numel)
        ops.all_gather_flat(gathered, every[rank].clone(), group).wait()
        assert torch.equal(gathered.view(n, numel), every)
        if dtype != torch.bool:
            part = numel // n
            wholes = every[:, : part * n].contiguous()
            mine = every.new_empty(part)
            ops.reduce_scatter_flat(mine, wholes[rank].clone(), group).wait()
            assert torch.equal(mine, total[rank * part :][:part])
        theirs = [every[rank, : numel * (to + 1) // n].clone() for to in range(n)]
        shapes = [(numel * (rank + 1) // n,)] * n
        for source, part in enumerate(ops.all_to_all(theirs, shapes, group)):
            assert torch.equal(part, every[source, : shapes[source][0]])


@each
@settings(max_examples=4, deadline=None)
@given(ranks=st.integers(2, 8), numels=st.lists(SIZES, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_collectives(pool: Pool, transport: str, ranks: int, numels: list[int], dtype: torch.dtype) -> None:
    pool.run(collectives, ranks, transport, numels, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each
def test_collectives_of_every_dtype(pool: Pool, transport: str, dtype: torch.dtype) -> None:
    pool.run(collectives, 3, transport, [0, 1, 7, 100_003], dtype)


def same_bits(transport: str, numels: list[int]) -> list[Tensor]:
    group, found = world(transport), []
    for numel in numels:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        found.append(ops.all_reduce(x, group))
    return found


def sum_of_two(transport: str, numel: int) -> None:
    """The bits of one addition, whichever way the numbers go."""
    mine, theirs = (torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2))
    total = mine + theirs
    x = (mine, theirs)[dist.get_rank()]
    ops.start_all_reduce(x, world(transport)).wait()
    assert torch.equal(x, total)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@each
def test_two_ranks_sum_what_is_large_to_the_same_bits(pool: Pool, transport: str, beyond: int) -> None:
    pool.run(sum_of_two, 2, transport, ops._EXCHANGED // 4 + beyond)


def parts_along(transport: str) -> None:
    """Along the first dimension, behind others of one element, whose parts lie end to end, and behind more."""
    group, n, rank = world(transport), dist.get_world_size(), dist.get_rank()
    for shape, dim in (((6, 5), 0), ((1, 6, 5), 1), ((1, 1, 6), 2), ((2, 6, 5), 1), ((3, 1, 6), 2)):
        every = [torch.arange(30 * shape[0]).view(-1)[: torch.Size(shape).numel()].view(shape) + r for r in range(n)]
        whole = sum(every)
        part = ops.reduce_scatter(every[rank].clone(), group, dim)
        assert torch.equal(part, whole.chunk(n, dim)[rank])
        assert torch.equal(ops.all_gather(part, group, dim), whole)


@pytest.mark.parametrize("ranks", [2, 3])
@each
def test_parts_along_any_dimension(pool: Pool, transport: str, ranks: int) -> None:
    pool.run(parts_along, ranks, transport)


@each
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_the_same_bits_on_every_rank(pool: Pool, transport: str, ranks: int) -> None:
    numels = [1, 17, 5000, 300_001]
    first, *others = pool.run(same_bits, ranks, transport, numels)
    for numel, mine in zip(numels, first, strict=True):
        every = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
        torch.testing.assert_close(mine, sum(every))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def sub_groups(transport: str) -> tuple[float, float]:
    """Sums along both axes of a 2 x 2 grid, on the way at the same time."""
    grid = mesh(transport, dp=2, tp=2)
    x, y = (torch.full((70_000,), float(10**dist.get_rank())) for _ in range(2))
    pending = [ops.start_all_reduce(x, grid.group("tp")), ops.start_all_reduce(y, grid.group("dp"))]
    for work in pending[:: 1 if dist.get_rank() % 3 else -1]:  # some wait in the other order
        work.wait()
    assert (x == x[0]).all() and (y == y[0]).all()
    return x[0].item(), y[0].item()


@each
def test_sub_groups(pool: Pool, transport: str) -> None:
    assert pool.run(sub_groups, 4, transport) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


def copies(numel: int) -> None:
    """A staged operation reads its tensors when it starts, and writes its result in the wait."""
    grid, n, rank = mesh("staged", tp=dist.get_world_size()), dist.get_world_size(), dist.get_rank()
    group = grid.group("tp")
    sent, arriving = torch.full((numel,), float(rank)), torch.full((numel,), -1.0)
    messages = [ops.start_send(sent, (rank + 1) % n, group), ops.start_receive(arriving, (rank - 1) % n, group)]
    x, full, gathered, part = torch.ones(numel), torch.ones(n * numel), torch.zeros(n * numel), torch.zeros(numel)
    works = [
        ops.start_all_reduce(x, group), ops.all_gather_flat(gathered, x, group),
        ops.reduce_scatter_flat(part, full, group), *messages,
    ]
    for tensor in (sent, x, full):
        tensor.fill_(7)
    assert not gathered.any() and not part.any() and (arriving == -1).all()
    for work in works:
        work.wait()
    assert (x == n).all() and (gathered == 1).all() and (part == n).all()
    assert (arriving == (rank - 1) % n).all() and (sent == 7).all() and (full == 7).all()


def test_a_staged_operation_copies_at_its_start_and_in_its_wait(pool: Pool) -> None:
    pool.run(copies, 3, 1000)


def test_the_first_rank_says_that_staging_is_slow() -> None:
    with pytest.warns(UserWarning, match="for checking, not for speed"):
        Mesh(Layout(tp=2), 0, transport="staged")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Mesh(Layout(tp=2), 1, transport="staged")


def timeouts() -> tuple[float, ...]:
    groups = [mesh("backend", dp=2, tp=2).group(axis) for axis in ("world", "tp", "dp")]
    return tuple(group.backend._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups)


def test_every_group_has_the_timeout_of_the_world(pool: Pool) -> None:
    assert pool.run(timeouts, 4, timeout=40.0) == [(30.0, 30.0, 30.0)] * 4


# ---- in flight --------------------------------------------------------------------------------------------------


def in_flight(transport: str, seed: int, numel: int) -> None:
    """Start several collectives in one order on all ranks; wait for them in an order of each rank's own."""
    group, n, rank = world(transport), dist.get_world_size(), dist.get_rank()
    random.seed(seed * 100 + rank)
    pending: list[tuple[ops.Pending, Callable[[], bool]]] = []
    for i in range(6):
        x = torch.full((numel * n,), float(rank + i))
        expected = float(sum(r + i for r in range(n)))
        if i % 3 == 0:
            work = ops.start_all_reduce(x, group)
            pending.append((work, lambda x=x, e=expected: bool((x == e).all())))
        elif i % 3 == 1:
            part = torch.empty(numel)
            work = ops.reduce_scatter_flat(part, x, group)
            pending.append((work, lambda x=part, e=expected: bool((x == e).all())))
        else:
            out = torch.empty(n * numel * n)
            work = ops.all_gather_flat(out, x, group)
            rows = torch.arange(float(n)).add(i).unsqueeze(1)
            pending.append((work, lambda x=out, e=rows: bool((x.view(n, -1) == e).all())))
        if transport == "auto":  # gloo's own waits complete in order
            random.shuffle(pending)
        time.sleep(random.random() * 0.003)
        while len(pending) > 3:
            work, right = pending.pop(0)
            work.wait()
            assert right()
    for work, right in pending:
        work.wait()
        assert right()


@each
@settings(max_examples=4, deadline=None)
@given(ranks=st.integers(2, 8), seed=st.integers(0, 99), numel=st.sampled_from([1, 1000, 50_000]))
def test_several_in_flight(pool: Pool, transport: str, ranks: int, seed: int, numel: int) -> None:
    pool.run(in_flight, ranks, transport, seed, numel)


def crossed(numel: int) -> bool:
    """A large collective is on its way on two groups, and each rank first waits for another one."""
    grid = mesh("auto", dp=2, tp=2)
    x, y = torch.ones(numel), torch.ones(numel)
    along, across = ops.start_all_reduce(x, grid.group("tp")), ops.start_all_reduce(y, grid.group("dp"))
    first, second = (along, across) if dist.get_rank() in (0, 3) else (across, along)
    first.wait()
    second.wait()
    return bool((x == 2).all() and (y == 2).all())


def test_ranks_that_wait_in_a_circle_go_on(pool: Pool) -> None:
    """More than the rings hold, so that nobody can finish without what others do while they wait for something else."""
    assert all(pool.run(crossed, 4, 8 * transport.CAPACITY // 4))


def test_eight_ranks_on_few_cores_take_little_time(pool: Pool) -> None:
    pool.run(many_small, 8, 1)
    start = time.monotonic()
    pool.run(many_small, 8, 300)
    assert time.monotonic() - start < 20  # they hand the cores to each other, and do not spin a time slice away


def many_small(times: int) -> None:
    group, x = world("auto"), torch.ones(1000)
    for _ in range(times):
        ops.all_reduce(x.fill_(1), group)
    assert (x == dist.get_world_size()).all()


def waiting(seconds: float) -> float:
    """Seconds of a core that a rank takes while it waits for the other."""
    group, x = world("auto"), torch.zeros(1)
    ops.all_reduce(x, group)
    begin = time.process_time()
    if dist.get_rank():
        time.sleep(seconds)
    ops.all_reduce(x, group)
    return time.process_time() - begin


def test_who_waits_long_takes_no_core_from_others(pool: Pool) -> None:
    assert pool.run(waiting, 2, 0.6)[0] < 0.06


# ---- transfers --------------------------------------------------------------------------------------------------


def round_trip(transport: str, numels: list[int], dtype: torch.dtype) -> None:
    """Each rank sends to every other, all messages before the first is received."""
    grid = mesh(transport, pp=dist.get_world_size())
    group, n, rank = grid.group("pp"), dist.get_world_size(), dist.get_rank()
    others = [r for r in range(n) if r != rank]
    sent = [ops.start_send(values(rank + numel, numel, dtype), to, group) for numel in numels for to in others]
    for source in others:
        received = [torch.empty(numel, dtype=dtype) for numel in numels]
        works = [ops.start_receive(x, source, group) for x in received]
        for work, x in zip(works, received, strict=True):
            work.wait()
            assert torch.equal(x, values(source + x.numel(), x.numel(), dtype))
    for work in sent:
        work.wait()


@each
@settings(max_examples=4, deadline=None)
@given(
    ranks=st.integers(2, 5),
    numels=st.lists(st.integers(1, 50_000), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_messages_arrive_in_order(
    pool: Pool, transport: str, ranks: int, numels: list[int], dtype: torch.dtype
) -> None:
    pool.run(round_trip, ranks, transport, numels, dtype)


def test_messages_may_be_larger_than_the_ring_and_many(pool: Pool) -> None:
    """Both ranks send three times what the ring holds before either receives."""
    pool.run(round_trip, 2, "auto", [transport.PAIR_CAPACITY // 8 * 9, 0, 1, transport.PAIR_CAPACITY // 8 * 15],
    torch.uint8)


def through_two_views(capacity: int) -> float:
    """A rank sends more than the other has taken, through one view of the ranks, and waits through another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "PAIR_CAPACITY", capacity)
        whole = Mesh(Layout(dp=2, pp=2), dist.get_rank())
        pipeline, everyone = whole.replica().group("pp"), whole.with_layout(whole.layout).group("world")
        x, place = torch.ones(capacity), whole.index("pp")
        sent = ops.start_send(x, whole.ranks("pp")[1], pipeline) if place == 0 else None
        if place == 1:
            ops.start_receive(x, whole.ranks("pp")[0], pipeline).wait()
        total = ops.all_reduce(torch.ones(1), everyone).item()
        if sent:
            sent.wait()
        return total


def test_whoever_waits_anywhere_drives_what_was_started_through_another_view(pool: Pool) -> None:
    assert pool.run(through_two_views, 4, 4096, timeout=8.0) == [4.0] * 4


def polled(capacity: int) -> tuple[bool, str]:
    """A message that is larger than the room for it goes by asking alone whether it has gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "PAIR_CAPACITY", capacity)
        group, rank = mesh("auto", pp=2).group("pp"), dist.get_rank()
        x = torch.full((4 * capacity,), float(1 - rank))
        work = ops.start_receive(x, 0, group) if rank else ops.start_send(x, 1, group)
        deadline = time.monotonic() + 5
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.0001)
        with pytest.raises(ValueError) as error:
            ops.all_reduce(torch.ones(1), group, dist.ReduceOp.PRODUCT)
        return bool(x.all()), str(error.value)


def test_asking_whether_it_is_done_is_enough_and_other_reductions_are_refused(pool: Pool) -> None:
    for arrived, said in pool.run(polled, 2, 4096):
        assert arrived and "reduce by sum, max or min" in said
