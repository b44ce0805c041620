"""The network that is imitated between ranks: it changes when collectives end, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives import ops
from shoal.engine.collectives.group import Group, ThrottledLink
from shoal.engine.collectives.mesh import Mesh
from shoal.launch.worker_pool import Pool
from shoal.spec.config import build_config
from shoal.spec.layout import Layout
from shoal.training.check import check

NUMBERS = 50_000  # of 8 bytes
RATE = 4e6  # so that 400 kB take 0.1 s, longer than anything here computes


def _each(group: Group) -> dict[str, tuple[Callable[[], torch.Tensor], float]]:
    """Every collective with the bytes that it sends from each of two ranks."""
    rank = group.rank()
    x = torch.arange(NUMBERS, dtype=torch.float64) + rank
    size = 8 * NUMBERS

    def shifted() -> torch.Tensor:
        out = torch.empty_like(x)
        other = group.ranks[1 - rank]
        ops.start_shift(x, other, out, other, group).wait()
        return out

    return {
        "sum": (lambda: ops.all_reduce(x.clone(), group), size),
        "max": (lambda: ops.all_reduce(x.clone(), group, dist.ReduceOp.MAX), size),
        "gather": (lambda: ops.all_gather(x, group), size),
        "scatter": (lambda: ops.reduce_scatter(x, group), size / 2),
        "all-to-all": (lambda: torch.cat(ops.all_to_all([x, x], [x.shape, x.shape], group)), size),
        "shift": (shifted, size),
    }


def _slowed(transport: str) -> dict[str, tuple[bool, float, float]]:
    """Per collective: whether it gives the same, its seconds, and those that its bytes take."""
    layout = Layout(tp=2)
    plain, slow = (
        Mesh(layout, dist.get_rank(), transport=transport, link=link).group("tp")
        for link in (None, ThrottledLink(RATE))
    )
    wanted = {name: run() for name, (run, _) in _each(plain).items()}
    answers = {}
    for name, (run, size) in _each(slow).items():
        dist.barrier()
        begin = time.monotonic()
        given = run()
        answers[name] = (torch.equal(given, wanted[name]), time.monotonic() - begin, size / RATE)
    return answers


@pytest.mark.parametrize("transport", ["auto", "backend"])
def test_every_collective_takes_as_long_as_its_bytes(pool: Pool, transport: str) -> None:
    for answers in pool.run(_slowed, 2, transport):
        for name, (same, seconds, least) in answers.items():
            assert same, name
            assert least <= seconds, name


def _two_at_once() -> tuple[float, float]:
    group = Mesh(Layout(dp=2), dist.get_rank(), link=ThrottledLink(RATE / 3)).group("dp")
    tensors = [torch.ones(NUMBERS, dtype=torch.float64) for _ in range(2)]
    dist.barrier()
    begin = time.monotonic()
    works = [ops.start_all_reduce(x, group) for x in tensors]
    time.sleep(0.5)  # what is computed meanwhile hides as much of the network
    works[0].wait()
    middle = time.monotonic() - begin
    works[1].wait()
    return middle, time.monotonic() - begin


def test_bytes_go_one_after_another_while_the_rank_computes(pool: Pool) -> None:
    for first, second in pool.run(_two_at_once, 2):
        assert 0.5 <= first < second
        assert 0.6 <= second < 1.1, "the network's 0.6 s, and not those after the 0.5 of the sleep"


@pytest.mark.parametrize(("name", "value"), [("pp", 2), ("sync", "sgp")])
def test_what_would_not_go_through_it_is_refused(name: str, value: object) -> None:
    parallel = {"dp": 2, name: value}
    with pytest.raises(UsageError, match=rf"link_gbs = 0.1 with parallel.{name}"):
        check(build_config({"testing": {"link_gbs": 0.1}, "parallel": parallel}))


@pytest.mark.parametrize("sync", ["int8", "diloco"])
def test_what_relaxed_replicas_exchange_by_collectives_goes_through_it(sync: str) -> None:
    check(build_config({"testing": {"link_gbs": 0.1}, "parallel": {"dp": 2, "sync": sync}}))
