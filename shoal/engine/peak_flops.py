"""The matrix-product rate that a device can reach, against which utilisation is counted."""

from __future__ import annotations

import time
from functools import cache

import torch

from shoal.engine.device import device_name, usable_cores
from shoal.spec.catalog.accelerators import match

_SIZE = 1024  # large enough for the peak rate of a core, small enough for a fraction of a second
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}


def peak_flops(dtype: torch.dtype, device: torch.device, local_ranks: int = 1) -> float | None:
    """Peak FLOP/s of dense matrix products on this rank's device.

    On CUDA the data sheet's (None for a device that the catalog does not know). On the CPU, where no sheet says what
    these threads can reach, the best of some products measured now.

    Args:
        local_ranks: ranks that share this machine's cores.
    """
    if device.type == "cuda":
        known = match(device_name(device))
        return known.peak_flops.get(_KINDS.get(dtype, "")) if known else None
    wanted = local_ranks * torch.get_num_threads()
    return _here(dtype, torch.get_num_threads()) * min(1.0, usable_cores() / wanted)


@cache
def _here(dtype: torch.dtype, threads: int) -> float:
    """With so many threads, once in a process."""
    return measured_matmul_flops(dtype)


def measured_matmul_flops(dtype: torch.dtype, *, size: int = _SIZE, products: int = 6) -> float:
    """FLOP/s of the fastest of some ``size``-cubed products on the CPU, with the threads that torch has now.

    By the CPU time that they take, not by the clock on the wall: what else the machine does must not lower the peak.
    """
    # As a linear layer multiplies: the other way round, fp16 on the CPU has no fast kernel (3 against 17 GFLOP/s).
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype).t()
    out = a @ b
    best = float("inf")
    for _ in range(products):
        begin = time.process_time()
        torch.mm(a, b, out=out)
        best = min(best, time.process_time() - begin)
    return 2 * size**3 / best * torch.get_num_threads()
