"""Collectives on memory that a group allocated, for both transports, and that it is given back."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.collectives import ops
from shoal.engine.collectives.group import allocate
from shoal.launch.worker_pool import Pool
from tests.engine.collectives.test_transport import DTYPES, both, values, world


def common(transport: str, parts: list[int], dtype: torch.dtype, seed: int) -> None:
    """Collectives on memory that the group allocated, between others; it is written to as soon as one is complete."""
    group, n, rank = world(transport), dist.get_world_size(), dist.get_rank()
    random.seed(seed * 100 + rank)
    for part in parts:
        x, y, z = (allocate(n * part, dtype, torch.device("cpu"), group) for _ in range(3))
        for turn in range(3):
            every = torch.stack([values(r + 8 * turn, n * part, dtype) for r in range(n)])
            total, mine = every.sum(0, dtype=dtype), slice(rank * part, (rank + 1) * part)
            parted = every.view(n, n, part).diagonal().t().flatten()  # of rank r, part r
            x.copy_(every[rank])
            y.copy_(every[rank])
            z[mine] = every[rank][mine]
            elsewhere = every[rank].clone()
            pending = [
                (ops.reduce_scatter_flat(x[mine], x, group), lambda x=x, t=total[mine], m=mine: torch.equal(x[m], t)),
                (ops.start_all_reduce(y, group), lambda y=y, t=total: torch.equal(y, t)),
                (ops.start_all_reduce(elsewhere, group), lambda e=elsewhere, t=total: torch.equal(e, t)),
                (ops.all_gather_flat(z, z[mine], group), lambda z=z, p=parted: torch.equal(z, p)),
            ]
            random.shuffle(pending)
            for work, holds in pending:
                work.wait()
                assert holds()
                if work is pending[0][0]:
                    time.sleep(random.random() * 1e-3)
            for tensor in (x, y, z):  # nobody reads it any more
                tensor.fill_(7)


@both
@settings(max_examples=6, deadline=None)
@given(
    ranks=st.integers(2, 5),
    parts=st.lists(st.one_of(st.integers(0, 200), st.sampled_from([4096, 60_001])), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES[:6]),
    seed=st.integers(0, 99),
)
def test_common_memory(
    pool: Pool, transport: str, ranks: int, parts: list[int], dtype: torch.dtype, seed: int
) -> None:
    pool.run(common, ranks, transport, parts, dtype, seed)


def one_for_all(transport: str, parts: list[int], dtype: torch.dtype, seed: int) -> list[str]:
    """Each rank writes its part of a buffer that is the same memory to all, in turn with reading the whole."""
    group, n, rank = world(transport), dist.get_world_size(), dist.get_rank()
    random.seed(seed * 100 + rank)
    refused = []
    for part in parts:
        x = allocate(n * part, dtype, torch.device("cpu"), group, one=True)
        mine = x[rank * part : (rank + 1) * part]
        for turn in range(4):
            every = [values(r + 8 * turn, part, dtype) for r in range(n)]
            mine.copy_(every[rank])
            elsewhere = torch.ones(3)
            pending = [ops.all_gather_flat(x, mine, group), ops.start_all_reduce(elsewhere, group)]
            random.shuffle(pending)
            for work in pending:
                work.wait()
            time.sleep(random.random() * 1e-3)
            assert torch.equal(x, torch.cat(every))
            ops.all_reduce(elsewhere, group)  # nobody reads any more
        if part and group.shared is not None:
            for collective in (ops.start_all_reduce, partial(ops.reduce_scatter_flat, mine)):
                with pytest.raises(ValueError, match="the same memory") as error:
                    collective(x, group)
                refused.append(str(error.value))
    return refused


@both
@settings(max_examples=6, deadline=None)
@given(
    ranks=st.integers(2, 5),
    parts=st.lists(st.one_of(st.integers(0, 200), st.just(60_001)), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES[:6]),
    seed=st.integers(0, 99),
)
def test_one_memory_of_all_ranks_is_gathered_and_never_summed(
    pool: Pool, transport: str, ranks: int, parts: list[int], dtype: torch.dtype, seed: int
) -> None:
    refused = pool.run(one_for_all, ranks, transport, parts, dtype, seed)[0]
    assert len(refused) == (2 * sum(map(bool, parts)) if transport == "auto" else 0)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shoal")


def freed() -> tuple[int, int, int]:
    group = world("auto")
    before = mapped()
    x = allocate(5000, torch.float32, torch.device("cpu"), group)
    ops.all_reduce(x, group)
    during = mapped()
    del x
    dist.barrier()
    return before, during, mapped()


def test_common_memory_is_given_back_with_its_tensor(pool: Pool) -> None:
    for before, during, after in pool.run(freed, 2):
        assert before < during
        assert after == before
