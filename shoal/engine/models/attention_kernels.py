"""Choice of the attention kernel by device, number format, head width and mask: the only place of this decision.

| device | format | mask | kernels, in order of preference |
|---|---|---|---|
| CPU | any | any | torch's CPU kernel |
| CUDA 9.0, 10.x | bf16, fp16 | causal | cuDNN (from 9.15.1), flash, memory-efficient |
| CUDA 8.0, 8.x, 12.x | bf16, fp16 | causal | flash, memory-efficient |
| CUDA from 8.0 | bf16, fp16 | documents; windows; causal over a cache | flash, with lengths and a window, no mask |
| CUDA | bf16, fp16 | dense | memory-efficient |
| CUDA | fp32 | causal, dense | memory-efficient, math |
| CUDA | fp64 | causal, dense | math |

Flash takes heads up to 256 wide; with lengths their width must be a multiple of 8. The memory-efficient kernel needs a
multiple of 8 as well. What neither takes goes to the math kernel, which stores all scores. cuDNN and flash take grouped
heads; the others get copies. cuDNN before 9.15.1 is wrong for lengths that are no multiple of 128 (torch issue 169849).

Sources: torch 2.11 to 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from shoal.engine.compiler import constant

Kernel = Literal["sdpa", "explicit"]
MaskKind = Literal["causal", "lengths", "dense"]
FusedKernel = Literal["cpu", "cudnn", "flash", "efficient", "math"]

BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


class CudaDevice(NamedTuple):
    """What the choice depends on: compute capability, and cuDNN's version (91501 is 9.15.1; 0 is none)."""

    capability: tuple[int, int]
    cudnn: int


def choose_kernels(
    device: CudaDevice | None, dtype: torch.dtype, head_dim: int, mask: MaskKind
) -> tuple[FusedKernel, ...]:
    """Return the kernels that may compute attention, in order of preference; () if none takes lengths.

    Args:
        device: None is the CPU.
        mask: "lengths" cuts sequences by cumulative lengths, or aligns a causal mask at the last of more keys.
    """
    if device is None:
        return () if mask == "lengths" else ("cpu",)
    half = dtype in (torch.bfloat16, torch.float16)
    flash = half and device.capability >= (8, 0) and head_dim <= 256
    if mask == "lengths":
        return ("flash",) if flash and head_dim % 8 == 0 else ()
    if flash and mask == "causal":
        first = device.capability[0] in (9, 10) and device.cudnn >= 91501
        return ("cudnn", "flash", "efficient") if first else ("flash", "efficient")
    if dtype == torch.float64 or head_dim % 8:
        return ("math",)
    return ("efficient",) if half else ("efficient", "math")


@cache
def describe_device(device: torch.device) -> CudaDevice | None:
    """Return what the choice of kernels depends on; None for devices other than CUDA."""
    if device.type != "cuda":
        return None
    return CudaDevice(torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0)


@constant
def sdpa_backends(device: torch.device, dtype: torch.dtype, head_dim: int, mask: MaskKind) -> list[SDPBackend]:
    """Return the kernels of `choose_kernels` for ``scaled_dot_product_attention`` on a CUDA device."""
    return [BACKENDS[name] for name in choose_kernels(describe_device(device), dtype, head_dim, mask)]


@constant
def takes_lengths(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether fused attention cuts sequences by lengths, and needs no dense mask."""
    return "flash" in choose_kernels(describe_device(device), dtype, head_dim, "lengths")
