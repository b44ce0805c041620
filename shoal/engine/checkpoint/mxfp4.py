"""Experts stored in MXFP4, as gpt-oss has them: blocks of 32 numbers of 4 bits with one power of two (OCP MX 1.0)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_HALF, *(-value for value in _HALF))  # of each code of 4 bits: E2M1


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks in float32, exactly: [.., g, 16] and [.., g] uint8 -> [.., 32 g].

    The lower half of a byte is the first number. A scale is an exponent of two plus 127.

    >>> decode_mxfp4(torch.tensor([[0x71] * 16], dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:2]
    tensor([ 1., 12.])
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [.., g, 32]
    values = torch.tensor(_VALUES)[codes.int()]
    return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).flatten(-2)


class Mxfp4Slice:
    """Part of a tensor [E, in, out] stored as blocks [E, out, in / 32, 16] with scales, decoded where it is read.

    Args:
        blocks, scales: slices of a file of safetensors.
    """

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, out, groups = self._scales.get_shape()
        return [experts, groups * BLOCK, out]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, slice, slice]) -> Tensor:
        experts, inside, out = part
        groups = slice(inside.start // BLOCK, -(-inside.stop // BLOCK))
        found = decode_mxfp4(self._blocks[experts, out, groups], self._scales[experts, out, groups])
        start = inside.start - groups.start * BLOCK
        return found[..., start : start + inside.stop - inside.start].transpose(1, 2)
