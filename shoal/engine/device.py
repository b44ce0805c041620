"""Process group setup, device functions and CPU tuning: all code that depends on CPU, CUDA or operating system."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import leave_groups
from shoal.engine.models.products import tune_products
from shoal.spec.catalog.accelerators import match

COLLECTIVE_SECONDS = 600.0  # maximum wait for other ranks
_PRODUCT, _PRODUCT_OF_ONE = 1024, 768  # side of a measured product, of one thread: large enough for the peak rate
_MEASURED_SECONDS = 0.06  # CPU time of measured products: two or more where the kernel is fast, else one is enough
_KINDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8",
    torch.float4_e2m1fn_x2: "fp4",
}  # fmt: skip
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # on CUDA, gloo still carries host tensors

# glibc maps large blocks separately and trims the heap by default, so each step maps its tensors again, and the kernel
# zeroes the pages. These settings keep freed memory in the process; docs/launch.md has the measured gain.
# Names and numbers: glibc manual, "Malloc Tunable Parameters"; numbers from <malloc.h>.
_MALLOC = {
    "MALLOC_MMAP_MAX_": (-4, 0),  # never map blocks separately: large blocks come from the heap too
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),  # free bytes at the top of the heap before trimming: practically never
    "MALLOC_TOP_PAD_": (-2, 64 * 2**20),  # bytes requested beyond the need: fewer brk calls
}


def init_world(
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
    device: torch.device | str = "cpu",
    timeout: float = COLLECTIVE_SECONDS,
    *,
    transport: str = "auto",
) -> None:
    """Join the default process group: gloo on CPU, NCCL (with gloo for host tensors) on CUDA.

    The world is not bound to the device (``device_id``), so NCCL connects a group at its first collective, and each
    pair of ranks at its first message: a pipeline, which has one group for each direction, gets a communicator for
    every edge and direction (`shoal.engine.runtime.Runtime`). In a bound world all messages of a group share the
    communicator of its collectives, where a receive posted ahead blocks the next send, and new groups are split from
    the world's communicator, which ranks outside the group must do too. Barriers need no bound device: they use gloo.

    Args:
        store: rendezvous store; None reads ``MASTER_ADDR`` and ``MASTER_PORT``.
        device: device of this rank from `pick_device`; a CUDA device becomes the current one.
        timeout: timeout of every collective, seconds.
        transport: the mesh's; with "staged" ranks on CUDA exchange host tensors only, so the group needs no NCCL.

    Raises:
        UsageError: the rendezvous port is in use.
    """
    device = torch.device(device)
    if device.type == "cuda":
        os.environ.update(cuda_environment())  # before the first allocation and communicator, which read it
        torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())
        round_only_results()
    try:
        dist.init_process_group(
            BACKENDS["cpu" if transport == "staged" else device.type],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UsageError(
            f"MASTER_PORT = {os.environ.get('MASTER_PORT')} is in use by another process of {platform.node()}, and the "
            "ranks cannot meet there.\n  Set another port, or end that process."
        ) from None


def destroy_world() -> None:
    """Leave the default process group and all groups created from it; do nothing without one.

    gloo waits up to 10 ms for each connection that it closes, so groups close theirs side by side.
    """
    leave_groups()
    if dist.is_initialized():
        groups, host = list(dist.distributed_c10d._world.pg_names), torch.device("cpu")
        backends = [group._get_backend(host) for group in groups if host in group._device_types]
        groups.clear()
        dist.destroy_process_group()
        closing = [threading.Thread(target=backends.pop) for _ in backends]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    # Torch names groups by their number. A rank whose rendezvous failed must count like one that never tried.
    dist.distributed_c10d._world.group_count = 0


def abort_device_groups() -> None:
    """End the collectives that this process's CUDA devices execute, so that the thread that waits for them continues.

    For another thread. Gloo cannot be aborted.
    """
    if torch.cuda.is_initialized() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_names):
            if dist.get_backend(group) != "gloo":
                group.abort()


def pick_device(
    choice: str, local_rank: int = 0, *, bound: bool = False, shared: bool = False, setting: str = "train.device"
) -> torch.device:
    """Return the device of one rank; ``auto`` takes CUDA if available, else the CPU.

    Args:
        choice: ``auto``, ``cpu`` or ``cuda``.
        local_rank: rank on this machine; it takes the CUDA device of the same index.
        bound: whether the rank may see only its own CUDA device, at index 0 (SLURM's ``--gpus-per-task=1``).
        shared: whether more local ranks than CUDA devices share them in turn, which needs a staged transport
            (`choose_transport`).
        setting: name of the setting that made the choice, for the message.

    Raises:
        UsageError: ``cuda`` is unavailable, or more local ranks than CUDA devices exist.
    """
    if choice not in ("auto", "cpu", "cuda"):
        raise UsageError(f"{setting} = {choice!r}; allowed: auto, cpu, cuda")
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if devices == 0:
        raise UsageError(
            f"{setting} = 'cuda', but torch sees no CUDA device here.\n  Use {setting} cpu or auto."
        )
    if bound and devices == 1:
        local_rank = 0
    if shared:
        local_rank %= devices
    if local_rank >= devices:
        raise UsageError(
            f"local rank {local_rank} has no CUDA device: this machine has {devices}, one for each rank."
            f"\n  Start at most {devices} ranks per machine, or use train.device cpu."
        )
    return torch.device("cuda", local_rank)


def choose_transport(device: torch.device, local_ranks: int) -> str:
    """Return the mesh's transport: "staged" if ranks must share a CUDA device, which NCCL refuses, else "auto"."""
    return "staged" if device.type == "cuda" and local_ranks > torch.cuda.device_count() else "auto"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done (the CPU queues none)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Records times between operations of a device, without waiting for it.

    Call `start` first, and again before the marks of another step.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._begin = 0.0
        self._first: torch.cuda.Event | None = None  # on CUDA, set by `start`

    def start(self) -> None:
        """Wait for queued work, and synchronise the device's clock with the host's."""
        if self.device.type == "cuda":
            self._first = first = self.mark()
            first.synchronize()
            self._begin = time.perf_counter()

    def mark(self) -> Any:
        """Record the current time; on CUDA, the time at which all work queued so far completes."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the marks as host `time.perf_counter` values; waits for them.

        It does not wait for the full device: a receive posted in advance may depend on a rank that waits for this one.
        """
        if self.device.type != "cuda":
            return list(marks)
        assert self._first is not None, "`start` comes first"
        for mark in marks:
            mark.synchronize()
        return [self._begin + self._first.elapsed_time(mark) / 1000 for mark in marks]


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels inside the context. Call `allow_reproducible_products` beforehand.

    Without it some CUDA kernels add in any order, such as the backward of attention.

    Raises:
        RuntimeError: by torch, at an operator without a deterministic kernel.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def round_only_results() -> None:
    """Let products on CUDA round nothing but their results, on every rank, whatever was set in this process before.

    float32 products do not round their inputs to TF32, which `tune_process` on the CPU also allows on CUDA, and 16-bit
    products add in float32 to the end, where cuBLAS by default may round parts of a sum to 16 bits.
    """
    torch.set_float32_matmul_precision("highest")  # after `allow_tf32 = False` torch refuses to report the precision
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def allow_reproducible_products() -> None:
    """Set the environment that deterministic cuBLAS requires, before the process's first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def peak_flops(dtype: torch.dtype, device: torch.device, local_ranks: int = 1) -> float | None:
    """Return the peak FLOP/s of dense matrix products on this rank's device.

    On CUDA it is the data sheet value (None for a device not in the catalog). On the CPU it is the best of several
    measured products, because no data sheet covers a given number of threads.

    Args:
        local_ranks: ranks that share this machine's cores.
    """
    if device.type == "cuda":
        known = match(torch.cuda.get_device_name(device))
        return known.peak_flops.get(_KINDS.get(dtype, "")) if known else None
    threads = torch.get_num_threads()
    return _measure_flops(dtype, threads) * min(1.0, usable_cores() / (local_ranks * threads))


@cache
def _measure_flops(dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of the fastest of several products on the CPU, with torch's current number of threads.

    It uses CPU time instead of wall time, so other load on the machine does not lower the peak.
    """
    # Same operand order as in a linear layer: otherwise fp16 has no fast CPU kernel (3 against 17 GFLOP/s).
    side = _PRODUCT_OF_ONE if threads == 1 else _PRODUCT
    a, b = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype).t()
    out = a @ b
    seconds: list[float] = []
    while sum(seconds) < _MEASURED_SECONDS:
        begin = time.process_time()
        torch.mm(a, b, out=out)
        seconds.append(time.process_time() - begin)
    return 2 * side**3 / min(seconds) * threads


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a CUDA device, of the full process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count the parent's memory at the time of the fork
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_memory() -> int:
    """Return the bytes of memory available to processes of this machine: installed memory, or a lower cgroup limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):  # limits of parent groups apply too
            limit = folder / name
            if folder.is_relative_to(root) and limit.exists() and (value := limit.read_text().strip()).isdigit():
                limits.append(int(value))
    return min(limits)


def loopback() -> str:
    """Return the name of the loopback network interface."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cores_per_rank(local_ranks: int) -> int:
    """Return the number of CPU threads for each of ``local_ranks`` ranks on this machine."""
    return max(1, usable_cores() // local_ranks)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits for any reason (Linux only; else no effect).

    The kernel watches the parent *thread* that started this process, so start ranks from a long-lived thread.

    Args:
        parent: process id of the parent, to detect that it exited before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1  # from <sys/prctl.h>
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def allocator_environment() -> dict[str, str]:
    """Return environment variables that configure the allocator of a new process (only glibc reads them)."""
    return {name: str(value) for name, (_, value) in _MALLOC.items()}


def cuda_environment() -> dict[str, str]:
    """Return the environment variables of ranks on CUDA devices, where the user has not set them.

    The allocator's segments grow, as activations and gathered parameters of many sizes otherwise leave fragments that
    fit nothing. A collective that fails or times out ends the process; NCCL's flight recorder then writes the rank's
    newest collectives (`write_collective_traces`). Torch reads the variables at its first allocation and communicator:
    c10/cuda/CUDAAllocatorConfig.h, ProcessGroupNCCL.hpp, FlightRecorder.hpp, with these names in torch 2.11 to 2.13.
    """
    variables = {
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",): "3",  # end the process; aborting communicators first can hang
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",  # collectives that are kept
    }
    return {names[0]: value for names, value in variables.items() if os.environ.keys().isdisjoint(names)}


def write_collective_traces(folder: Path) -> None:
    """Make NCCL's flight recorder write ``nccl-RANK`` into a folder, for ``torchfrtrace``; torch's default is /tmp."""
    if os.environ.keys().isdisjoint(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        folder.mkdir(exist_ok=True)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "nccl-")


def read_collective_trace() -> bytes:
    """Return the newest collectives of this process's groups as JSON, by torch's flight recorder; b"" without one.

    Torch has one recorder for NCCL, and one for the other backends.
    """
    recorders = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(recorders, name, None)) and b'"entries":[{' in (found := bytes(dump())):
            return found
    return b""


def tune_allocator() -> bool:
    """Configure the allocator of this process for future allocations; return whether that worked (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(option, value) == 1 for option, value in _MALLOC.values())


def tune_process(*, products: bool = True) -> None:
    """Set the allocator and the library of matrix products of this process: torch's default without `products`."""
    tune_allocator()
    tune_products(allowed=products)
