"""Peak matrix-product rate of a device, the reference for utilisation."""

from __future__ import annotations

import time
from functools import cache

import torch

from shoal.engine.device import device_name, usable_cores
from shoal.spec.catalog.accelerators import match

_SIZE = 1024  # large enough for the peak rate of a core, small enough for a fraction of a second
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}


def peak_flops(dtype: torch.dtype, device: torch.device, local_ranks: int = 1) -> float | None:
    """Return the peak FLOP/s of dense matrix products on this rank's device.

    On CUDA it is the data sheet value (None for a device not in the catalog). On the CPU it is the best of several
    measured products, because no data sheet covers a given number of threads.

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
    """Measure with this number of threads, once per process."""
    return measured_matmul_flops(dtype)


def measured_matmul_flops(dtype: torch.dtype, *, size: int = _SIZE, products: int = 6) -> float:
    """Return the FLOP/s of the fastest of several ``size``-cubed products on the CPU, with torch's current threads.

    It uses CPU time instead of wall time, so other load on the machine does not lower the peak.
    """
    # Same operand order as in a linear layer: otherwise fp16 has no fast CPU kernel (3 against 17 GFLOP/s).
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype).t()
    out = a @ b
    best = float("inf")
    for _ in range(products):
        begin = time.process_time()
        torch.mm(a, b, out=out)
        best = min(best, time.process_time() - begin)
    return 2 * size**3 / best * torch.get_num_threads()
