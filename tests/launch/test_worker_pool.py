"""The pool: fresh groups of exactly n ranks, causes of failures by rank, and going on after them."""

import faulthandler
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.device import init_world
from shoal.launch import worker_pool
from shoal.launch.prefork import PreforkServer, local_environment
from shoal.launch.worker_pool import Pool, RankError

ROOT = Path(__file__).parents[2]


def sum_of_ranks(weight: float) -> tuple[int, int, float]:
    x = torch.tensor([weight * dist.get_rank()])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def subgroup_sum() -> float:
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=mesh["tp"].get_group())
    return x.item()


def big_tensor() -> torch.Tensor:
    return torch.full((1 << 20,), float(dist.get_rank()))


def raises_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ArithmeticError("the real cause")
    dist.barrier()


def exits_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os._exit(7)
    dist.barrier()


def killed_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def aborts_on(bad: int) -> None:
    if dist.get_rank() == bad:
        faulthandler.disable()  # no stack in the log of a suite that passes
        os.abort()
    dist.barrier()


def folder_of_worker(_: int) -> str:
    return os.getcwd()


def fails_at_once_or_sleeps(seconds: float) -> None:
    if not seconds:
        raise ArithmeticError("the real cause")
    time.sleep(seconds)


def sleeps_for_ever_on(bad: int) -> None:
    if dist.get_rank() == bad:
        time.sleep(1000)
    dist.barrier()


def unpicklable() -> object:
    return lambda: None


@settings(max_examples=10, deadline=None)
@given(ranks=st.integers(1, 8))
def test_a_call_sees_exactly_its_ranks(pool, ranks):
    assert pool.run(sum_of_ranks, ranks, 2.0) == [(r, ranks, ranks * (ranks - 1.0)) for r in range(ranks)]


def test_eight_ranks_take_well_under_a_second(pool):
    took = []
    for _ in range(5):
        start = time.monotonic()
        pool.run(sum_of_ranks, 8, 1.0)
        took.append(time.monotonic() - start)
    assert min(took) < 1.0  # the machine may be busy


def test_subgroups_do_not_leak_into_the_next_call(pool):
    for _ in range(2):
        assert pool.run(subgroup_sum, 4) == [1.0, 1.0, 5.0, 5.0]
    assert pool.run(subgroup_sum, 2) == [0.0, 1.0]


def test_tensors_come_back_whole(pool):
    for rank, tensor in enumerate(pool.run(big_tensor, 2)):
        assert torch.equal(tensor, torch.full((1 << 20,), float(rank)))


@pytest.mark.parametrize("bad", [0, 2])
def test_the_rank_that_raised_is_named_first_with_its_traceback(pool, bad):
    with pytest.raises(RankError) as caught:
        pool.run(raises_on, 3, bad)
    rank, cause = caught.value.failures[0]
    assert rank == bad, caught.value
    assert "in raises_on" in cause and "ArithmeticError: the real cause" in cause
    assert {rank for rank, _ in caught.value.failures} == {0, 1, 2}
    assert str(caught.value).index(f"rank {bad}") < str(caught.value).index("perhaps only because a peer was lost")
    assert pool.run(sum_of_ranks, 3, 1.0)[2] == (2, 3, 3.0)


@pytest.mark.parametrize("fn, said", [
    (exits_on, "exited with code 7"), (killed_on, "killed by SIGKILL"), (aborts_on, "killed by SIGABRT"),
])
def test_a_worker_that_dies_is_named_and_replaced(pool, fn, said):
    with pytest.raises(RankError) as caught:
        pool.run(fn, 2, 1)
    assert caught.value.failures[0][0] == 1
    assert said in caught.value.failures[0][1]
    assert pool.run(sum_of_ranks, 2, 1.0)[1] == (1, 2, 1.0)


def test_the_death_of_the_first_worker_is_noticed_though_the_server_starts_with_it(monkeypatch):
    """The server is a fork: it must not keep open the worker's end of the pipe."""
    with ExitStack() as stack:
        start = cache(lambda: stack.enter_context(PreforkServer(local_environment(1))))
        monkeypatch.setattr(worker_pool, "shared_server", start)
        with Pool(1) as pool, pytest.raises(RankError, match="was killed by SIGKILL"):
            pool.run(killed_on, 1, 0, timeout=20)


def meets_nobody_next_time(bad: int) -> None:
    if dist.get_rank() == bad:
        sys.modules["__main__"].init_world = meet_nobody


def meet_nobody(rank: int, ranks: int, *_: object) -> None:
    sys.modules["__main__"].init_world = init_world
    init_world(rank, ranks, dist.HashStore(), "cpu", 0.5)


def test_a_worker_that_could_not_join_is_replaced(pool, monkeypatch):
    """It has begun one more group than the others, by whose number they find each other."""
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.2)  # in which the other waits for it
    pool.run(meets_nobody_next_time, 2, 1)
    with pytest.raises(RankError, match=r"--- rank 1: Traceback(.|\n)*meet_nobody"):
        pool.run(sum_of_ranks, 2, 1.0)
    assert pool.run(sum_of_ranks, 3, 1.0, timeout=20.0) == [(rank, 3, 3.0) for rank in range(3)]


def test_a_worker_that_hangs_is_named_with_its_stack_and_replaced(pool):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(sleeps_for_ever_on, 2, 1, timeout=2.5)
    assert time.monotonic() - start < 15
    rank, cause = caught.value.failures[0]
    assert rank == 1
    assert "hung" in cause and "in sleeps_for_ever_on" in cause
    assert pool.run(sum_of_ranks, 2, 1.0)[0] == (0, 2, 1.0)


def test_a_result_that_does_not_pickle_is_an_error_of_the_rank(pool):
    with pytest.raises(RankError, match="pickle"):
        pool.run(unpicklable, 1)


def test_what_cannot_be_asked(pool):
    with pytest.raises(TypeError, match="lambda"):
        pool.run(lambda: None, 1)
    for ranks in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            pool.run(big_tensor, ranks)


def refuses_even(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return -number


def test_items_are_worked_on_alone_and_those_that_fail_are_numbered():
    with Pool(2) as pool:
        seen = []
        assert pool.map(abs, [-3, -2, -1, 0], done=lambda *value: seen.append(value)) == [3, 2, 1, 0]
        assert sorted(seen) == [(0, 3), (1, 2), (2, 1), (3, 0)]
        with pytest.raises(RankError) as caught:
            pool.map(refuses_even, [1, 2, 3, 4, 5])
        assert sorted(number for number, _ in caught.value.failures) == [1, 3]
        assert caught.value.reason.endswith(" is even")


def counts_on(by: int) -> tuple[int, int]:
    counted.append(by)
    return dist.get_world_size(), sum(counted)


counted: list[int] = []


def test_ranks_that_keep_their_group_keep_what_they_have():
    with Pool(2, keep_group=True) as pool:
        assert [pool.run(counts_on, 2, by) for by in (1, 5)] == [[(2, 1), (2, 1)], [(2, 6), (2, 6)]]
        with pytest.raises(RankError, match="the real cause"):
            pool.run(raises_on, 2, 1)
        assert pool.run(counts_on, 2, 1) == [(2, 1), (2, 1)]  # others, in a new group


def imports(name: str) -> None:
    importlib.import_module(name)


def looked_through() -> int:
    return len(gc.get_objects())


def test_what_a_call_imports_is_looked_through_once_and_not_after_each_later_call(pool, tmp_path, monkeypatch):
    (tmp_path / "of_many_objects.py").write_text("lists = [[i] for i in range(100_000)]")
    monkeypatch.syspath_prepend(tmp_path)
    pool.run(imports, 2, "of_many_objects")
    assert max(pool.run(looked_through, 2)) < 50_000


def test_workers_start_in_the_callers_folder(tmp_path, monkeypatch):
    with Pool(1) as pool:  # starts the server of all pools, if it has not been started
        assert pool.map(folder_of_worker, [0]) == [os.getcwd()]
    monkeypatch.chdir(tmp_path)
    with Pool(1) as pool:
        assert pool.map(folder_of_worker, [0]) == [str(tmp_path)]


def test_a_failing_item_can_end_the_others(monkeypatch):
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.2)
    with Pool(2) as pool:
        pool.map(folder_of_worker, [0, 1])
        start = time.monotonic()
        with pytest.raises(RankError) as found:
            pool.map(fails_at_once_or_sleeps, [30.0, 0.0, 30.0], stop_early=True)
        assert time.monotonic() - start < 15 and [number for number, _ in found.value.failures] == [1]


def test_closing_ends_the_workers():
    with Pool(1) as pool:
        (pid,) = pool.run(os.getpid, 1)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_no_worker_outlives_a_killed_parent():
    code = (
        "import os, time\nfrom shoal.launch import worker_pool\nfrom shoal.launch.worker_pool import Pool\n"
        "worker_pool.PRELOADED = []\n"
        "if __name__ == '__main__':\n pool = Pool(1); print(*pool.run(os.getpid, 1), flush=True)\n"
        " pool.run(time.sleep, 1, 100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)  # into the call, where no broken pipe is noticed
        parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=5)
    assert not alive
