"""Matrices that must be whole, some at a time: which rank works on which, and how their parts come to it and go back.

Of a matrix every holder may have a part, anywhere. Each is worked on by one of them: sums over the ranks are
reduce-scattered to these owners and their results all-gathered, through one buffer [ranks, n] in which every rank has
a run of n elements of its own. What an owner has in one turn, its matrices end to end, passes in as many such runs as
it takes, so that neither the number of ranks nor the size of the model decides how large the buffer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.base.boxes import flat_range
from shoal.engine.optim.orthogonal import AT_ONCE, orthogonal_flops
from shoal.engine.optim.shards import ShardPart, Shards


class Matrix(NamedTuple):
    """What is made orthogonal as one: a parameter, or one expert of it.

    Attributes:
        name: of the parameter.
        first: where it begins in the flat parameter.
        shape: rows and columns.
    """

    name: str
    first: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class BoxMove(NamedTuple):
    """A box that goes from a shard to its place in a buffer, and back.

    Attributes:
        shard: of the rank, by number.
        part, inner: where the box lies in it.
        place, shape, outer: where in the buffer: a run of elements, the shape these are seen in, and what of that.
    """

    shard: int
    part: ShardPart
    inner: tuple[slice, ...]
    place: slice
    shape: tuple[int, ...]
    outer: tuple[slice, ...]

    def of(self, flat: Tensor) -> Tensor:
        """The box in a tensor that lies like the shard."""
        return flat[self.part.slice].view(self.part.box.shape)[self.inner]

    def through(self, buffer: Tensor) -> Tensor:
        """The box in the buffer."""
        return buffer[self.place].view(self.shape)[self.outer]


class MatrixRound(NamedTuple):
    """Matrices that the ranks work on at one time, some for each.

    Attributes:
        mine: this rank's, end to end.
        pieces: consecutive runs of what every rank's are end to end, and the moves of this rank's shards in each.
    """

    mine: list[Matrix]
    pieces: list[tuple[slice, list[BoxMove]]]


def turns(shards: Shards) -> Iterator[MatrixRound]:
    """Of one rank, for all matrices of some shards."""
    holders = shards.holders
    held: dict[str, list[tuple[int, ShardPart]]] = {}
    for i, shard in enumerate(shards.shards):
        for part in shard.parts:
            held.setdefault(part.name, []).append((i, part))
    each = max(1, AT_ONCE // holders.ranks)
    wide = products(shards.dtype, shards.device) != torch.bfloat16
    for turn in turns_of(shards.parameters, holders.ranks, wide=wide):
        longest = max(sum(matrix.numel for matrix in matrices) for matrices in turn)
        pieces = [slice(start, min(start + each, longest)) for start in range(0, longest, each)]
        yield MatrixRound(turn[holders.index], [(piece, list(_moves(shards, held, turn, piece))) for piece in pieces])


def products(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What matrices of a dtype are multiplied in: float32 on CUDA in bfloat16, which is enough (Jordan et al. 2024)."""
    return torch.bfloat16 if dtype == torch.float32 and device.type == "cuda" else dtype


def turns_of(parameters: dict[str, tuple[int, ...]], ranks: int, *, wide: bool) -> list[tuple[list[Matrix], ...]]:
    """The matrices that each rank works on, turn by turn: [turn][rank].

    Largest first, each to the rank with the least to do.

    Args:
        wide: multiplied in float32 or float64 (`orthogonal_flops`).
    """
    matrices = [
        Matrix(name, first, (whole[-2], whole[-1]))
        for name, whole in parameters.items()
        for first in range(0, math.prod(whole), whole[-2] * whole[-1])
    ]
    cost = partial(orthogonal_flops, wide=wide)
    work = [0] * ranks
    runs: list[list[list[Matrix]]] = [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=lambda matrix: (-cost(matrix.shape), matrix)):
        owner = work.index(min(work))
        work[owner] += cost(matrix.shape)
        if not runs[owner] or sum(m.numel for m in runs[owner][-1]) + matrix.numel > AT_ONCE:
            runs[owner].append([])
        runs[owner][-1].append(matrix)
    return list(zip_longest(*runs, fillvalue=[]))


def _moves(
    shards: Shards, held: dict[str, list[tuple[int, ShardPart]]], turn: tuple[list[Matrix], ...], piece: slice
) -> Iterator[BoxMove]:
    """Of this rank's parts, what lies in a run of every rank's matrices."""
    for rank, matrices in enumerate(turn):
        start = 0  # of a matrix among its rank's
        for matrix in matrices:
            first, last = max(piece.start, start), min(piece.stop, start + matrix.numel)
            at, inside = rank * (piece.stop - piece.start) + first - piece.start, matrix.first - start
            for offset, box in flat_range(shards.parameters[matrix.name], first + inside, last + inside):
                place = slice(at + offset, at + offset + box.numel)
                for shard, part in held.get(matrix.name, ()):
                    if (common := box.intersect(part.box)) is not None:
                        inner, outer = common.inside(part.box).slices, common.inside(box).slices
                        yield BoxMove(shard, part, inner, place, box.shape, outer)
            start += matrix.numel
