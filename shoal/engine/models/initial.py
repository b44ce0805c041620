"""Initial values that depend on (seed, parameter name, index) alone.

A rank can therefore fill any part of any parameter without drawing the rest, and every layout starts from the same
model. Each element's index is hashed by a counter-based generator, so no generator state is carried.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.base.boxes import Box

_BLOCK = 1 << 18  # elements at a time: the scratch memory stays in the cache, and small for any shard


class Initial(NamedTuple):
    """A normal distribution; std 0 is a constant."""

    mean: float
    std: float


def fill(out: Tensor, *, name: str, whole: tuple[int, ...], box: Box, initial: Initial, seed: int) -> None:
    """Write the initial values of one box of a parameter.

    Args:
        out: receives them, of shape ``box.shape``; any float dtype, any device.
        name: the parameter's name in the whole model.
        whole: the parameter's whole shape.
        box: which part of it ``out`` is.
    """
    if initial.std == 0:
        out.fill_(initial.mean)
        return
    key = key_of(seed, name)
    rows_at_once = max(1, _BLOCK // max(1, math.prod(box.shape[1:])))
    for row in range(0, box.shape[0], rows_at_once):
        rows = min(rows_at_once, box.shape[0] - row)
        part = Box((box.offset[0] + row, *box.offset[1:]), (rows, *box.shape[1:]))
        values = normal(key, positions(part, whole, out.device))
        out[row : row + rows].copy_(values.mul_(initial.std).add_(initial.mean))


def key_of(seed: int, name: str) -> int:
    """The key of a stream of random numbers, a signed word."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)


def normal(key: int, index: Tensor) -> Tensor:
    """Standard normal numbers, float64, one for each int64 index: uniform ones through the distribution's inverse."""
    return torch.special.ndtri(uniform(key, index))


def uniform(key: int, index: Tensor) -> Tensor:
    """Random numbers between 0 and 1, both excluded, float64, one for each int64 index.

    SplitMix64's output function (Steele, Lea & Flood 2014, figure 16) of ``key + index * golden``: its top 53 bits.
    """
    z = index * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return (_shift(z, 11).double() + 0.5) * 2.0**-53


def positions(box: Box, whole: tuple[int, ...], device: torch.device) -> Tensor:
    """Row-major positions in the whole tensor of a box's elements, of shape ``box.shape``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, n) in enumerate(zip(box.offset, box.shape, strict=True)):
        along = torch.arange(offset, offset + n, device=device) * math.prod(whole[dim + 1 :])
        index = index.unsqueeze(-1) + along
    return index


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
