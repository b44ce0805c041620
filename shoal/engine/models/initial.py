"""Initial values as a function of (seed, parameter name, index).

A rank can fill any part of any parameter without drawing the rest, and every layout starts from the same model. A
counter-based generator hashes the index of each element, so no generator state exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.base.boxes import Box

# Elements per step.
_BLOCK = 1 << 18  # the scratch memory fits in the cache and is small for any shard
_CUDA_BLOCK = 1 << 24  # ~30 launches each; scratch memory of several times 128 MiB, before any activations


class _SkipInit(TorchFunctionMode):
    """Skip the initial values of torch's linear layers, whose operators torch decomposes in Python on meta tensors."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create modules in the enclosed code on the meta device: no rank allocates or fills an unsharded matrix."""
    with torch.device("meta"), _SkipInit():
        yield


class Initial(NamedTuple):
    """Parameters of a normal distribution; std 0 is a constant."""

    mean: float
    std: float


def fill(out: Tensor, *, name: str, global_shape: tuple[int, ...], box: Box, initial: Initial, seed: int) -> None:
    """Write the initial values of one box of a parameter.

    Args:
        out: destination of shape ``box.shape``; any float dtype, any device.
    """
    if initial.std == 0:
        out.fill_(initial.mean)
        return
    key = stream_key(seed, name)
    block = _CUDA_BLOCK if out.is_cuda else _BLOCK
    rows_at_once = max(1, block // max(1, math.prod(box.shape[1:])))
    for row in range(0, box.shape[0], rows_at_once):
        rows = min(rows_at_once, box.shape[0] - row)
        part = Box((box.offset[0] + row, *box.offset[1:]), (rows, *box.shape[1:]))
        values = normal(key, positions(part, global_shape, out.device))
        out[row : row + rows].copy_(values.mul_(initial.std).add_(initial.mean))


def stream_key(seed: int, name: str) -> int:
    """Return the key of a random stream, a signed 64-bit integer."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)


def normal(key: int, index: Tensor) -> Tensor:
    """Draw standard normal float64 numbers, one per int64 index, by inverse transform of uniform ones."""
    return torch.special.ndtri(uniform(key, index))


def uniform(key: int, index: Tensor) -> Tensor:
    """Draw uniform float64 numbers in the open interval (0, 1), one per int64 index.

    Uses the top 53 bits of SplitMix64's output function (Steele, Lea & Flood 2014, figure 16) of
    ``key + index * golden``.
    """
    z = index * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ shift_right(z, 31)
    return (shift_right(z, 11).double() + 0.5) * 2.0**-53


def positions(box: Box, global_shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row-major positions of a box's elements in the full tensor, of shape ``box.shape``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, n) in enumerate(zip(box.offset, box.shape, strict=True)):
        along = torch.arange(offset, offset + n, device=device) * math.prod(global_shape[dim + 1 :])
        index = index.unsqueeze(-1) + along
    return index


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right logically; the shift of signed integers keeps the sign."""
    return (z >> bits) & ((1 << (8 * z.element_size() - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
