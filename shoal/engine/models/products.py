"""Which library multiplies float32 matrices on the CPU.

torch takes MKL's products, which on AMD's processors are those for AVX2, whatever the processor can do: on Zen 5 less
than half of its rate, on Zen 4, whose units are half as wide, nine tenths. oneDNN, which torch has for narrower
formats, takes the widest instructions that there are. torch hands it float32 matrices where they may be rounded to
bfloat16 on the way, and it rounds them on processors with AMX alone, which AMD's have not: `tune_products` looks.

For each shape that it meets first oneDNN makes code, which takes 0.3 to 1.5 ms, and it is slow with vectors. What has
ever new shapes, and what is small, is multiplied by MKL as before (`by_mkl`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

_CPUINFO = Path("/proc/cpuinfo")
_EXACT = 1e-5  # relative to the largest element; bfloat16's products are off by 1e-3
_FEW = 1 << 15  # numbers in the keys of a head, from which torch's attention kernel is no slower with oneDNN

_by_onednn = False


def tune_products() -> bool:
    """Have oneDNN make this process's float32 products where it is known to be faster; returns whether it does."""
    if not (torch.backends.mkldnn.is_available() and _multiplies_faster()):
        return False
    _choose(onednn=True)
    if not _exact():
        _choose(onednn=False)
    return _by_onednn


@contextmanager
def by_mkl() -> Iterator[None]:
    """Float32 products inside are MKL's, in all threads of the process."""
    if not _by_onednn or torch.compiler.is_compiling():
        yield
        return
    _choose(onednn=False)
    try:
        yield
    finally:
        _choose(onednn=True)


def of_small_blocks(k: Tensor) -> AbstractContextManager:
    """As `by_mkl`, for torch's attention kernel over some keys, [b, k, t, d], if they are few: the products of its
    blocks are then so small that a call of oneDNN's takes longer."""
    return by_mkl() if _few(k) else nullcontext()


def backward_of_small_blocks(out: Tensor, k: Tensor) -> Tensor:
    """As `of_small_blocks`, for the backward of what the kernel made, which is returned."""
    node = out.grad_fn
    if node is not None and _by_onednn and _few(k) and not torch.compiler.is_compiling():
        node.register_prehook(lambda gradients: _choose(onednn=False))
        node.register_hook(lambda inputs, gradients: _choose(onednn=True))
    return out


def _few(k: Tensor) -> bool:
    return k.shape[-2] * k.shape[-1] < _FEW


def _choose(*, onednn: bool) -> None:
    global _by_onednn
    _by_onednn = onednn
    torch.set_float32_matmul_precision("medium" if onednn else "highest")  # in the words that torch has for it


def _multiplies_faster() -> bool:
    """A processor of AMD's with AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _CPUINFO.exists():
        return False
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    return said.get("vendor_id") == "AuthenticAMD"


def _exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return float((a @ b - exact).abs().max() / exact.abs().max()) < _EXACT
