"""Sum gradients as 8-bit integers or signs, in two phases.

Each tensor is cut into blocks with separate scales.

int8    x ~ scale x integer, scale = largest magnitude of the block / 127 (Dettmers 2016, in its linear form).
1 bit   x ~ mean of the block's elements of the same sign (Seide et al. 2014, section 3.1; 1-bit Adam, Tang et al. 2021,
        has one magnitude for both signs).

Every rank is the server of an equal part of the blocks (Tang et al. 2021, algorithm 1): all ranks send it their codes
of its part; it adds their sum to its residual of the previous step (the *server error*), encodes the result and sends
it to all. A rank receives 2 (N - 1) / N of a coded gradient for N ranks, as in an all-reduce of the uncoded one. The
residuals make both phases lossless over time:

    sum of the new gradients + new server error = sum of all sent values + old server error

With blocks of one element both codes, and hence the sum, are exact up to rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_gather, all_to_all
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import MethodStates


@dataclass(frozen=True)
class Int8:
    """Code that rounds blocks [n, block] to 8-bit integers."""

    block: int

    def encode(self, blocks: Tensor, used: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a message: integers [n, block], scales [n]."""
        scale = blocks.abs().amax(1) / 127
        divisor = torch.where(scale > 0, scale, 1)
        return (blocks / divisor[:, None]).round_().to(torch.int8), scale

    def decode(self, integers: Tensor, scale: Tensor) -> Tensor:
        return integers.to(scale.dtype) * scale[:, None]


@dataclass(frozen=True)
class OneBit:
    """Code of blocks [n, block] as signs and the mean of the elements of each sign."""

    block: int

    def encode(self, blocks: Tensor, used: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a message: signs, 8 per byte [n * block / 8], means [n, 2]."""
        positive = blocks >= 0
        means = []
        for chosen in (positive & used, ~positive & used):
            means.append((blocks * chosen).sum(1) / chosen.sum(1).clamp(min=1))
        flat = F.pad(positive.flatten(), (0, -positive.numel() % 8))
        bits = (flat.view(-1, 8) * _weights(blocks.device)).sum(1, dtype=torch.uint8)
        return bits, torch.stack(means, 1)

    def decode(self, bits: Tensor, means: Tensor) -> Tensor:
        flat = (bits[:, None] & _weights(bits.device)).ne(0).flatten()
        positive = flat[: len(means) * self.block].view(-1, self.block)
        return torch.where(positive, means[:, :1], means[:, 1:])


def _weights(device: torch.device) -> Tensor:
    """Return the values of the bits of a byte."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


class CodedSum:
    """Coded sum over the ranks, of tensors in the layout of a replica's parameters.

    Args:
        group: ranks that hold the same part of each replica; None for one replica.

    Attributes:
        share: number of rows of blocks that each rank serves.
        used: [ranks x share, block], whether a position holds an element of a parameter.
        error: [share, block], residual of the sums that this rank served.
    """

    def __init__(self, flat: Flat, group: Group | None, code: Int8 | OneBit):
        self.flat, self.group, self.code = flat, group, code
        self.ranks, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.sizes = [math.prod(part.shape) for part in flat.parts]
        self.rows = [-(-size // code.block) for size in self.sizes]
        self.share = -(-sum(self.rows) // self.ranks)
        self.error = flat.weights[0].new_zeros(self.share, code.block)
        self.used = self.error.new_zeros(self.ranks * self.share, code.block, dtype=torch.bool)
        for place in self.places(self.used):
            place.fill_(True)

    def places(self, blocks: Tensor) -> list[Tensor]:
        """Return flat views of each parameter's elements in blocks [ranks x share, block]."""
        every = blocks[: sum(self.rows)].split(self.rows)
        return [rows.reshape(-1)[:size] for rows, size in zip(every, self.sizes, strict=True)]

    def sum(self, tensors: Sequence[Tensor], errors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, and each of ``errors`` by its residual."""
        blocks = torch.zeros_like(self.used, dtype=self.error.dtype)
        for place, tensor in zip(self.places(blocks), tensors, strict=True):
            place.copy_(tensor.reshape(-1))
        parts, used = blocks.split(self.share), self.used.split(self.share)
        messages = [self.code.encode(*some) for some in zip(parts, used, strict=True)]
        for part, message in zip(parts, messages, strict=True):
            part -= self.code.decode(*message)
        for place, error in zip(self.places(blocks), errors, strict=True):
            error.view(-1).copy_(place)
        served = self._served(messages, used[self.rank])
        every = [all_gather(some, self.group).view(-1, *some.shape) for some in served]
        total = torch.cat([self.code.decode(*message) for message in zip(*every, strict=True)])
        for place, tensor in zip(self.places(total), tensors, strict=True):
            tensor.view(-1).copy_(place)

    def _served(self, messages: Sequence[tuple[Tensor, ...]], used: Tensor) -> tuple[Tensor, ...]:
        """Return the coded sum of this rank's part, from its messages to the server of each part."""
        received = [
            all_to_all(some, [some[0].shape] * self.ranks, self.group) for some in zip(*messages, strict=True)
        ]
        total = self.error
        for message in zip(*received, strict=True):
            total += self.code.decode(*message)
        total *= used  # padding may decode to any value
        message = self.code.encode(total, used)
        total -= self.code.decode(*message)
        total *= used
        return message

    def pieces(self) -> dict[str, list[Piece]]:
        """Return the server errors of this rank's part by parameter name."""
        found: dict[str, list[Piece]] = defaultdict(list)
        flat, block = self.error.view(-1), self.code.block
        row = -self.rank * self.share  # row in this rank's part at which the parameter starts
        for part, size, rows in zip(self.flat.parts, self.sizes, self.rows, strict=True):
            first, last = max(row, 0), min(row + rows, self.share)
            start, stop = (first - row) * block, min((last - row) * block, size)
            for offset, box in part.split.boxes(start, stop):
                at = first * block + offset
                values = flat[at : at + box.numel].view(box.shape)
                found[part.name].append(Piece(part.split.global_shape, box, values, part.split.primary))
            row += rows
        return dict(found)


class Quantised(Compressed):
    """Compression that encodes blocks by ``code``, summed by `CodedSum`. See `Compressed`."""

    def __init__(self, flat: Flat, group: Group | None, code: Int8 | OneBit):
        super().__init__(flat, group)
        self.coded = CodedSum(flat, group, code)

    def exchange(self) -> None:
        self.coded.sum(self.tensors, self.error_views)

    def states(self) -> MethodStates:
        return replace(super().states(), spread={"server_error": self.coded.pieces()})
