"""Choice of the library for float32 matrix products on the CPU.

By default torch uses MKL, which limits AMD processors to AVX2: less than half of the peak rate on Zen 5, and nine
tenths on Zen 4, whose vector units are half as wide. oneDNN uses the widest instructions available. torch gives float32
matrices to oneDNN only if it may round them to bfloat16, which oneDNN does only on processors with AMX. AMD processors
have no AMX; `tune_products` verifies that the results are exact.

oneDNN generates code for each new shape (0.3 to 1.5 ms) and is slow for vectors. Small products and products of
changing shapes stay with MKL (`by_mkl`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

_CPUINFO = Path("/proc/cpuinfo")
_EXACT = 1e-5  # relative to the largest element; errors of bfloat16 are 1e-3
_FEW = 1 << 15  # elements in the keys of a head; from here on torch's attention kernel is not slower with oneDNN

_by_onednn = False


def tune_products(*, allowed: bool = True) -> bool:
    """Use oneDNN for this process's float32 products where it is allowed and known to be faster, else MKL.

    Returns:
        Whether oneDNN is used.
    """
    faster = allowed and torch.backends.mkldnn.is_available() and _multiplies_faster()
    if faster != _by_onednn:  # also in a fork of a tuned process
        _choose(onednn=faster)
    if faster and not _exact():
        _choose(onednn=False)
    return _by_onednn


@contextmanager
def by_mkl() -> Iterator[None]:
    """Use MKL for float32 products inside this context, in all threads of the process."""
    if not _by_onednn or torch.compiler.is_compiling():
        yield
        return
    _choose(onednn=False)
    try:
        yield
    finally:
        _choose(onednn=True)


def use_mkl_if_small(k: Tensor) -> AbstractContextManager:
    """Return `by_mkl` for torch's attention kernel if the keys [b, k, t, d] are few, else a null context.

    The blocks of few keys are so small that the call overhead of oneDNN dominates.
    """
    return by_mkl() if _few(k) else nullcontext()


def use_mkl_in_backward(out: Tensor, k: Tensor) -> Tensor:
    """Apply `use_mkl_if_small` to the backward of the kernel's output, and return the output."""
    if torch.compiler.is_compiling():  # which traces no `grad_fn`
        return out
    node = out.grad_fn
    if node is not None and _by_onednn and _few(k):
        node.register_prehook(lambda gradients: _choose(onednn=False))
        node.register_hook(lambda inputs, gradients: _choose(onednn=True))
    return out


def _few(k: Tensor) -> bool:
    return k.shape[-2] * k.shape[-1] < _FEW


def _choose(*, onednn: bool) -> None:
    global _by_onednn
    _by_onednn = onednn
    torch.set_float32_matmul_precision("medium" if onednn else "highest")  # torch's names for these modes


def _multiplies_faster() -> bool:
    """Return whether the processor is an AMD one with AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _CPUINFO.exists():
        return False
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return fields.get("vendor_id") == "AuthenticAMD"


def _exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return float((a @ b - exact).abs().max() / exact.abs().max()) < _EXACT
