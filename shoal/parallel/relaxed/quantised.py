"""Gradients as 8-bit integers or as signs, exchanged by an all-gather and added up by everyone.

Each tensor is cut into blocks that have a scale of their own.

int8    x ~ scale x integer, scale = largest magnitude of the block / 127 (Dettmers 2016, in its linear form).
1 bit   x ~ mean of the block's elements of its sign (Seide et al. 2014, section 3.1; Tang et al. 2021, 1-bit Adam, has
        one magnitude for both signs).

Sums of rounded numbers are not rounded again, so one gather is enough: a rank receives (N - 1) / 4, or (N - 1) / 32, of
a gradient's bytes, against 2 (N - 1) / N of them in an all-reduce. In blocks of one element both codes say what it is,
and the sum is the exact one to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.ops import all_gather
from shoal.parallel.relaxed.compress import Compressed
from shoal.parallel.relaxed.flat import Flat


@dataclass(frozen=True)
class Int8:
    """Rounds blocks [n, block] to integers of 8 bits."""

    block: int

    def encode(self, blocks: Tensor, used: Tensor) -> tuple[Tensor, ...]:
        """The parts of a message: integers [n, block], scales [n]."""
        scale = blocks.abs().amax(1) / 127
        divisor = torch.where(scale > 0, scale, 1)
        return (blocks / divisor[:, None]).round_().to(torch.int8), scale

    def decode(self, integers: Tensor, scale: Tensor) -> Tensor:
        """Blocks."""
        return integers.to(scale.dtype) * scale[:, None]


@dataclass(frozen=True)
class OneBit:
    """Keeps the signs of blocks [n, block], and the means of the elements of each sign."""

    block: int

    def encode(self, blocks: Tensor, used: Tensor) -> tuple[Tensor, ...]:
        """The parts of a message: signs, 8 in a byte [n * block / 8], means [n, 2]."""
        positive = blocks >= 0
        means = []
        for chosen in (positive & used, ~positive & used):
            means.append((blocks * chosen).sum(1) / chosen.sum(1).clamp(min=1))
        flat = F.pad(positive.flatten(), (0, -positive.numel() % 8))
        bits = (flat.view(-1, 8) * _weights(blocks.device)).sum(1, dtype=torch.uint8)
        return bits, torch.stack(means, 1)

    def decode(self, bits: Tensor, means: Tensor) -> Tensor:
        """Blocks."""
        flat = (bits[:, None] & _weights(bits.device)).ne(0).flatten()
        positive = flat[: len(means) * self.block].view(-1, self.block)
        return torch.where(positive, means[:, :1], means[:, 1:])


def _weights(device: torch.device) -> Tensor:
    """Of the bits of a byte."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


class Quantised(Compressed):
    """Args: as `Compressed`, and the code of a block."""

    def __init__(self, flat: Flat, group: Group | None, code: Int8 | OneBit):
        super().__init__(flat, group)
        self.code = code
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.rows = [-(-size // code.block) for size in self.sizes]
        first = self.tensors[0]
        self.blocks = first.new_zeros(sum(self.rows), code.block)
        self.used = torch.zeros_like(self.blocks, dtype=torch.bool)
        for place in self._places(self.used):
            place.fill_(True)

    def _places(self, blocks: Tensor) -> list[Tensor]:
        """Where each tensor's elements lie in blocks, flat."""
        return [
            rows.reshape(-1)[:size] for rows, size in zip(blocks.split(self.rows), self.sizes, strict=True)
        ]

    def exchange(self) -> None:
        """As `Compressed`."""
        for place, tensor in zip(self._places(self.blocks), self.tensors, strict=True):
            place.copy_(tensor.view(-1))
        message = self.code.encode(self.blocks, self.used)
        self.sent_bytes = sum(part.numel() * part.element_size() for part in message)
        self.blocks -= self.code.decode(*message)
        for place, error in zip(self._places(self.blocks), self.error_of, strict=True):
            error.view(-1).copy_(place)
        every = [all_gather(part, self.group).view(-1, *part.shape) for part in message]
        total = torch.zeros_like(self.blocks)
        for parts in zip(*every, strict=True):
            total += self.code.decode(*parts)
        for place, tensor in zip(self._places(total), self.tensors, strict=True):
            tensor.view(-1).copy_(place)
        self.blocks.zero_()
