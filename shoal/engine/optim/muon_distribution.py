"""Assignment of unsharded matrices to ranks for Muon, and communication of their shards.

Any holder may have a part of a matrix. One of them, its owner, orthogonalises it: the parts are reduce-scattered to
the owners, and the results all-gathered, through one buffer [ranks, n] in which every rank has n consecutive elements.
The matrices of an owner in one round are concatenated and sent in as many pieces of n elements as needed, so the
buffer size depends neither on the number of ranks nor on the size of the model.
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
    """A matrix to orthogonalise: a parameter, or one expert of it.

    Attributes:
        first: its first element in the flat parameter ``name``.
    """

    name: str
    first: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class BoxMove(NamedTuple):
    """Copy of a box between a shard and a buffer.

    Attributes:
        shard: index of the shard on this rank.
        part, inner: the part of the shard, and the box inside it.
        place, shape, outer: elements of the buffer, the shape of their view, and the box inside that view.
    """

    shard: int
    part: ShardPart
    inner: tuple[slice, ...]
    place: slice
    shape: tuple[int, ...]
    outer: tuple[slice, ...]

    def view_shard(self, flat: Tensor) -> Tensor:
        return flat[self.part.slice].view(self.part.box.shape)[self.inner]

    def view_buffer(self, buffer: Tensor) -> Tensor:
        return buffer[self.place].view(self.shape)[self.outer]


class MatrixRound(NamedTuple):
    """Matrices that the ranks process at the same time.

    Attributes:
        mine: this rank's matrices, concatenated.
        pieces: consecutive ranges of every rank's concatenated matrices, and the moves of this rank's shards in each.
    """

    mine: list[Matrix]
    pieces: list[tuple[slice, list[BoxMove]]]


def plan_rounds(shards: Shards) -> Iterator[MatrixRound]:
    """Yield the rounds of this rank for all matrices of some shards."""
    holders = shards.holders
    held: dict[str, list[tuple[int, ShardPart]]] = {}
    for i, shard in enumerate(shards.shards):
        for part in shard.parts:
            held.setdefault(part.name, []).append((i, part))
    each = max(1, AT_ONCE // holders.ranks)
    wide = product_dtype(shards.dtype, shards.device) != torch.bfloat16
    for each_rank in assign_matrices(shards.parameters, holders.ranks, wide=wide):
        longest = max(sum(matrix.numel for matrix in matrices) for matrices in each_rank)
        pieces = [slice(start, min(start + each, longest)) for start in range(0, longest, each)]
        moves = [(piece, list(_moves(shards, held, each_rank, piece))) for piece in pieces]
        yield MatrixRound(each_rank[holders.index], moves)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of products: bfloat16 for float32 matrices on CUDA, which suffices (Jordan et al. 2024)."""
    return torch.bfloat16 if dtype == torch.float32 and device.type == "cuda" else dtype


def assign_matrices(
    parameters: dict[str, tuple[int, ...]], ranks: int, *, wide: bool
) -> list[tuple[list[Matrix], ...]]:
    """Assign matrices to ranks: [round][rank].

    Matrices are sorted by work, then by shape; each goes to the rank with the least work.

    Args:
        wide: whether products are in float32 or float64 (`orthogonal_flops`).
    """
    matrices = [
        Matrix(name, first, (shape[-2], shape[-1]))
        for name, shape in parameters.items()
        for first in range(0, math.prod(shape), shape[-2] * shape[-1])
    ]
    cost = partial(orthogonal_flops, wide=wide)
    work = [0] * ranks
    runs: list[list[list[Matrix]]] = [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=lambda matrix: (-cost(matrix.shape), matrix.shape, matrix)):
        owner = work.index(min(work))
        work[owner] += cost(matrix.shape)
        if not runs[owner] or sum(m.numel for m in runs[owner][-1]) + matrix.numel > AT_ONCE:
            runs[owner].append([])
        runs[owner][-1].append(matrix)
    return list(zip_longest(*runs, fillvalue=[]))


def _moves(
    shards: Shards, held: dict[str, list[tuple[int, ShardPart]]], each_rank: tuple[list[Matrix], ...], piece: slice
) -> Iterator[BoxMove]:
    """Yield the moves of this rank's parts inside a range of every rank's matrices."""
    for rank, matrices in enumerate(each_rank):
        start = 0  # first element of a matrix among its rank's matrices
        for matrix in matrices:
            first, last = max(piece.start, start), min(piece.stop, start + matrix.numel)
            at, inside = rank * (piece.stop - piece.start) + first - piece.start, matrix.first - start
            for offset, box in flat_range(shards.parameters[matrix.name], first + inside, last + inside):
                place = slice(at + offset, at + offset + box.numel)
                for shard, part in held.get(matrix.name, ()):
                    if (common := box.intersect(part.box)) is not None:
                        inner, outer = common.to_local(part.box).slices, common.to_local(box).slices
                        yield BoxMove(shard, part, inner, place, box.shape, outer)
            start += matrix.numel
