"""Copies between a CUDA device and host memory: page-locked memory, and streams beside the computation."""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


def host_zeros(
    numel: int, dtype: torch.dtype, device: torch.device, what: str = "an offloaded state"
) -> torch.Tensor:
    """Return flat zeros in host memory, page-locked if a CUDA device will copy from and to them (see `lock_pages`)."""
    if device.type != "cuda" or numel == 0:
        return torch.zeros(numel, dtype=dtype)
    zeros = map_zeros(numel, dtype)
    lock_pages(zeros, device, what)
    return zeros


def map_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat zeros in pages of their own: CUDA may refuse to lock a page twice, for two tensors that share it.

    All cores touch them now, as huge pages where the system has them: otherwise CUDA touches them while it locks them,
    which takes eight times as long.
    """
    pages = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).zero_()


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to the device; the host does not wait for the copy."""
    if device.type != "cuda":
        return x.to(device)
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x).to(device, non_blocking=True)


def lock_pages(memory: torch.Tensor, device: torch.device, what: str) -> None:
    """Page-lock host memory until it is freed, so that a CUDA device copies into it without the host waiting.

    Unlike torch's page-locked tensors, whose sizes are powers of two, this takes no further memory. If the system
    refuses, warn once for each ``what``, the content of the memory, which then stays pageable.
    """
    if device.type != "cuda" or memory.numel() == 0:
        return

    def call(function: Callable[..., Any], *args: int) -> None:
        with torch.cuda.device(device):  # a background thread would use the first device, and create a context on it
            torch.cuda.check_error(function(*args))

    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    try:
        call(runtime.cudaHostRegister, address, memory.nbytes, 1)  # 1: for all devices
    except RuntimeError as error:
        _warn_of_pageable(what, str(error))
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error, which the next launch reports as its own
            torch.ones(1, device=device)
        return
    unlock = weakref.finalize(memory.untyped_storage(), call, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # the process frees it, perhaps after the CUDA context


@cache
def _warn_of_pageable(what: str, error: str) -> None:
    warnings.warn(f"The memory of {what} is not page-locked ({error}): copies block the host.", stacklevel=3)


@dataclass(frozen=True)
class Mark:
    """A moment in the work of a stream of a CUDA device; None on the CPU, whose work is done when a call returns."""

    event: torch.Event | None = None

    def wait(self) -> None:
        """Make later work on the current stream wait for this moment; the host does not wait."""
        if self.event is not None:
            self.event.wait()

    def synchronize(self) -> None:
        """Wait for this moment on the host."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """A stream of copies beside the computation of a CUDA device. On the CPU, work is done at once.

    It keeps no memory alive: the tensors that the work uses must exist until `Mark.wait` or `Mark.synchronize`.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.Stream(device) if device.type == "cuda" else None

    @property
    def queues(self) -> bool:
        """Whether work may be done later than `run` returns."""
        return self.stream is not None

    def run(self, work: Callable[[], object]) -> Mark:
        """Call ``work`` so that it runs on this stream, after all work queued so far on the current stream.

        Returns:
            the moment at which it is done.
        """
        if self.stream is None:
            work()
            return Mark()
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with self.stream:
            work()
        return Mark(self.stream.record_event())


def current_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return the current stream of a CUDA device: a context in which another thread queues its work there too."""
    return torch.accelerator.current_stream(device) if device.type == "cuda" else nullcontext()


def copy_later(x: torch.Tensor) -> tuple[torch.Tensor, Mark]:
    """Copy a small tensor to host memory; the copy has its values after the mark."""
    if not x.is_cuda:
        return x, Mark()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host, Mark(torch.accelerator.current_stream(x.device).record_event())
