"""Which device a rank gets."""

import mmap
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.device import choose_transport, cuda_environment, init_world, pick_device, write_collective_traces
from shoal.engine.streams import SideStream, host_zeros, lock_pages


@pytest.fixture
def see(monkeypatch):
    """Let torch see a number of CUDA devices."""

    def devices(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return devices


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_each_local_rank_has_a_device_of_its_own(see, choice):
    see(4)
    assert [pick_device(choice, rank).index for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="local rank 4 has no CUDA device: this machine has 4"):
        pick_device(choice, 4)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_the_one_device_that_a_bound_rank_sees_is_its_own(see, choice):
    see(1)
    assert [pick_device(choice, rank, bound=True).index for rank in range(4)] == [0, 0, 0, 0]
    with pytest.raises(UsageError, match="local rank 3"):
        pick_device(choice, 3)
    see(4)  # bound to none: all are there for all
    assert [pick_device(choice, rank, bound=True).index for rank in range(4)] == [0, 1, 2, 3]


def test_local_ranks_may_share_devices_with_a_staged_transport(see):
    see(2)
    assert [pick_device("cuda", rank, shared=True).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [choose_transport(torch.device("cuda"), ranks) for ranks in (1, 2, 3)] == ["auto", "auto", "staged"]
    assert choose_transport(torch.device("cpu"), 8) == "auto"


def test_without_cuda_auto_is_the_cpu_and_cuda_is_refused(see):
    see(0)
    assert pick_device("auto", 7).type == "cpu"
    with pytest.raises(UsageError, match="torch sees no CUDA device here"):
        pick_device("cuda")


def test_the_users_own_variables_of_cuda_ranks_take_precedence(monkeypatch, tmp_path):
    kept = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    ours = kept | {"PYTORCH_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE"}
    older = {"PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    for name in (*ours, *older, "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert cuda_environment().keys() == ours
    for name in older:
        monkeypatch.setenv(name, "mine")
    assert cuda_environment().keys() == kept
    write_collective_traces(tmp_path / "logs")
    assert not (tmp_path / "logs").exists()
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "")  # restored at the end
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    write_collective_traces(tmp_path / "logs")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/logs/nccl-" and (tmp_path / "logs").is_dir()


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch does not tell")
def test_the_allocators_variable_is_read_after_the_import_of_torch():
    code = (
        "import torch, os; from shoal.engine.device import cuda_environment; os.environ.update(cuda_environment());"
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == (
        "expandable_segments:True"
    )


def test_pages_are_locked_until_their_memory_is_freed(monkeypatch) -> None:
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(("lock", *args)) or 0,
        cudaHostUnregister=lambda *args: calls.append(("unlock", *args)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    memory = torch.empty(100, dtype=torch.uint8)
    lock_pages(memory, torch.device("cpu"), "a test")
    assert calls == []
    lock_pages(memory, torch.device("cuda", 0), "a test")
    view, address = memory[10:], memory.data_ptr()
    assert calls == [("lock", address, 100, 1)]
    del memory
    assert len(calls) == 1, "a view is left"
    del view
    assert calls[1:] == [("unlock", address)]


def test_memory_that_cannot_be_locked_stays_pageable(monkeypatch, recwarn) -> None:
    launches = []

    def launch(*args, **kwargs) -> None:
        launches.append(args)
        raise RuntimeError("CUDA error: out of memory")

    runtime = SimpleNamespace(cudaHostRegister=lambda *args: 2, cudaHostUnregister=None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: launch("out of memory (2)") if result else None)
    monkeypatch.setattr(torch, "ones", launch)
    first, second = (host_zeros(100, torch.float32, torch.device("cuda", 0)) for _ in range(2))
    assert first.count_nonzero() == second.count_nonzero() == 0
    assert first.numel() == 100 and first.data_ptr() % mmap.PAGESIZE == 0, "no page is shared"
    assert launches.count((1,)) == 2, "each reads the error that CUDA keeps"
    (warning,) = recwarn
    assert "The memory of an offloaded state is not page-locked (CUDA error: out of memory)" in str(warning.message)
    del first, second  # nothing to unlock


def test_a_side_stream_of_the_cpu_works_at_once() -> None:
    done, stream = [], SideStream(torch.device("cpu"))
    mark = stream.run(lambda: done.append(1))
    assert done == [1] and not stream.queues
    mark.wait()
    mark.synchronize()


def test_ranks_on_cuda_round_nothing_but_results_of_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("shoal.engine.device.cuda_environment", dict)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    settings, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # as in a process that was configured for products on the CPU
        settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = True
        init_world(0, 1, dist.HashStore(), torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "medium"
        init_world(0, 1, dist.HashStore(), torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "highest" and not settings.allow_tf32
        assert not settings.allow_bf16_reduced_precision_reduction
        assert not settings.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision(before)
