"""AdamW with block-wise quantised 8-bit moments (Dettmers et al. 2022, "8-bit Optimizers")."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.kernels.rounding import draw_bits, round_stochastically
from shoal.engine.models.initial import positions, stream_key
from shoal.engine.optim.low_precision_state import adamw_beside
from shoal.engine.optim.rule import BLOCK, Rule, to_pieces
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.spec.config import OptimizerConfig

WIDTH = 256  # consecutive elements in a row of the unsharded parameter
_SMALLEST = 4096  # parameters with fewer elements keep full-precision moments, as in the authors' code
_KINDS = ("exp_avg", "exp_avg_sq")
_RAISED = 2.0**15  # scale that keeps values far below the smallest code normal in float16


@dataclass
class _Tile:
    """Part of a shard: a matrix whose rows have the same block boundaries.

    Attributes:
        weights, gradient: [rows, columns], views of the shard.
        codes: [rows, columns] uint8, views of the first and second moments.
        scales: [rows, blocks] for each moment, the largest absolute value in a block.
        box: the blocks, in the parameter's shape with the last dim counted in blocks.
        block_shape: that shape.
        part: the shard part that contains the tile.
        starts: whether it has the first element of its blocks, and therefore saves them.
        first: its first column in the unsharded parameter.
        shared: index of its blocks in the table of blocks split between ranks; None if its blocks are complete.
    """

    weights: Tensor
    gradient: Tensor
    codes: list[Tensor]
    scales: list[Tensor]
    box: Box
    block_shape: tuple[int, ...]
    part: ShardPart
    starts: bool
    first: int
    shared: Tensor | None = None

    def rows(self) -> Iterator[slice]:
        """Return slices of rows that fit in the caches; all rows on a GPU."""
        rows, columns = self.weights.shape
        many = max(1, BLOCK // columns) if self.weights.device.type == "cpu" else rows
        return (slice(start, start + many) for start in range(0, rows, many))

    def places(self, rows: slice) -> Tensor:
        """Return the flat indices of its elements in the unsharded parameter, [rows, columns]."""
        box, device = self.part.box, self.weights.device
        starts = positions(Box((*box.offset[:-1], self.first), (*box.shape[:-1], 1)), self.part.global_shape, device)
        return starts.view(-1, 1)[rows] + torch.arange(self.weights.size(1), device=device)


class Adam8bit(Rule):
    """AdamW with 8-bit moments (section 2.2) and one scale per block (section 2.1).

    Blocks lie along the rows of the unsharded parameter, starting at its first column, so that every layout quantises
    the same elements together. The scale of a block split between ranks is the maximum over these ranks. Weights in
    bfloat16 are updated in float32 and rounded stochastically (`shoal.engine.optim.low_precision_state`).
    """

    def __init__(self, config: OptimizerConfig, shards: Shards, seed: int = 0):
        super().__init__(config, shards)
        self.seed, self.exact = seed, torch.promote_types(shards.dtype, torch.float32)
        kinds = shards.cut(lambda name, shape: math.prod(shape) >= _SMALLEST)
        empty = Shards({}, [], shards.dtype, shards.device, shards.holders)
        self.large, self.small = kinds.get(True, empty), adamw_beside(config, kinds.get(False, empty), seed)
        self.codes = [
            [torch.full_like(shard.weights, zero, dtype=torch.uint8) for shard in self.large.shards]
            for zero in (_zero_code(signed=True), _zero_code(signed=False))
        ]
        self.tiles = [
            (shard, tile)
            for i, shard in enumerate(self.large.shards)
            for part in shard.parts
            for tile in _tiles(shard, part, [codes[i] for codes in self.codes], self.exact)
        ]
        self.blocks_shared = self._share()
        self.levels = [dynamic_map(signed).to(shards.device, self.exact) for signed in (True, False)]
        self.nearest = [_codes(signed).to(shards.device) for signed in (True, False)]

    def _share(self) -> int:
        """Agree with the other holders on the blocks that are split between ranks; return their number."""
        mine = {id(tile): _keys(tile) for _, tile in self.tiles if not _is_complete(tile)}
        found = self.shards.holders.collect([key for keys in mine.values() for key in keys])
        place = {key: i for i, key in enumerate(sorted({tuple(key) for keys in found for key in keys}))}
        for _, tile in self.tiles:
            if id(tile) in mine:
                tile.shared = torch.tensor([place[key] for key in mine[id(tile)]], device=self.shards.device)
        return len(place)

    def update(self, learning_rate: float) -> None:
        self.small.step(learning_rate)
        table = torch.zeros(2, self.blocks_shared, dtype=self.exact, device=self.shards.device)
        waiting: list[tuple[_Tile, list[Tensor]]] = []
        for shard, tile in self.tiles:
            if tile.shared is not None:  # one block per row
                moments = self._moments(shard, tile, slice(None), learning_rate)
                for largest, moment in zip(table, moments, strict=True):  # tiles may share a block
                    largest[tile.shared] = torch.maximum(largest[tile.shared], moment.abs().amax(1))
                waiting.append((tile, moments))
                continue
            for rows in tile.rows():
                for i, moment in enumerate(self._moments(shard, tile, rows, learning_rate)):
                    scales = _blocked(moment).abs().amax(-1)
                    tile.scales[i][rows] = scales
                    tile.codes[i][rows] = _quantise(moment, scales, self.nearest[i])
        if self.blocks_shared:
            self.shards.holders.maximum(table)
        for tile, moments in waiting:
            for i, (largest, moment) in enumerate(zip(table, moments, strict=True)):
                scales = largest[tile.shared, None]
                tile.scales[i].copy_(scales)
                tile.codes[i].copy_(_quantise(moment, scales, self.nearest[i]))

    def _moments(self, shard: Shard, tile: _Tile, rows: slice, learning_rate: float) -> list[Tensor]:
        """Update some rows of the weights; return their new moments in full precision."""
        beta1, beta2 = self.config.betas
        weights, gradient = (x[rows].to(self.exact) for x in (tile.weights, tile.gradient))
        mean, square = (
            _dequantise(codes[rows], scales[rows], levels)
            for codes, scales, levels in zip(tile.codes, tile.scales, self.levels, strict=True)
        )
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rate = learning_rate * shard.rate
        root = (square / (1 - beta2**self.count)).sqrt_().add_(self.config.eps)
        weights.mul_(1 - rate * shard.decay).addcdiv_(mean, root, value=-rate / (1 - beta1**self.count))
        if tile.weights.dtype != self.exact:
            key = stream_key(self.seed, f"{tile.part.name}:weights:{self.count}")
            round_stochastically(tile.weights[rows], weights, draw_bits(key, tile.places(rows)))
        return [mean, square]

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        kinds = self.small.states()
        for i, kind in enumerate(_KINDS):
            kinds[f"{kind}_code"] = to_pieces(self.large.shards, self.codes[i])
            scales: dict[str, list[Piece]] = {}
            for _, tile in self.tiles:
                piece = Piece(
                    tile.block_shape, tile.box, tile.scales[i].view(tile.box.shape), tile.part.primary and tile.starts
                )
                scales.setdefault(tile.part.name, []).append(piece)
            kinds[f"{kind}_scale"] = scales
        return kinds

    def resume_at(self, count: int) -> None:
        super().resume_at(count)
        self.small.resume_at(count)


# ---- tiles -----------------------------------------------------------------------------------------------------


def _tiles(shard: Shard, part: ShardPart, codes: list[Tensor], exact: torch.dtype) -> Iterator[_Tile]:
    """Split a part of a shard at the first and last block boundary inside it; scales have dtype ``exact``."""
    *leading, left = part.box.offset
    *heights, width = part.box.shape
    right, columns = left + width, part.global_shape[-1]
    borders = sorted({left, min(right, -(-left // WIDTH) * WIDTH), max(left, right // WIDTH * WIDTH), right})
    block_shape = (*part.global_shape[:-1], -(-columns // WIDTH))
    views = [flat[part.slice].view(-1, width) for flat in (shard.weights, shard.gradient, *codes)]
    for start, stop in pairwise(borders):
        weights, gradient, *tile_codes = (view[:, start - left : stop - left] for view in views)
        first, last = start // WIDTH, -(-stop // WIDTH)
        scales = [torch.zeros(len(weights), last - first, dtype=exact, device=weights.device) for _ in _KINDS]
        yield _Tile(
            weights, gradient, tile_codes, scales, Box((*leading, first), (*heights, last - first)), block_shape, part,
            starts=start % WIDTH == 0, first=start,
        )


def _is_complete(tile: _Tile) -> bool:
    """Return whether a tile has all elements of its blocks; the last block of a row may be short."""
    first, blocks = tile.box.offset[-1], tile.box.shape[-1]
    return tile.starts and tile.weights.size(1) == min(blocks * WIDTH, tile.part.global_shape[-1] - first * WIDTH)


def _keys(tile: _Tile) -> list[tuple[str, int]]:
    """Return the keys of each row's only block: the parameter, and the block's index in it."""
    numbers = torch.arange(math.prod(tile.block_shape)).view(tile.block_shape)[tile.box.slices].flatten()
    return [(tile.part.name, number) for number in numbers.tolist()]


# ---- codes -----------------------------------------------------------------------------------------------------


@cache
def dynamic_map(signed: bool) -> Tensor:
    """Return the [256] values of the codes, ascending: dynamic tree quantisation (Dettmers 2016; section 1.3 of the
    paper).

    Each decade from 1e-7 to 1 has twice as many values as the one below; the unsigned map has twice as many in each.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float64)
        middles = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


@cache
def _codes(signed: bool) -> Tensor:
    """Return a lookup table [65536] from the bits of a float16 to the code nearest to its value divided by `_RAISED`.
    Values within a relative 2^-11 of the midpoint between two codes may get the other code."""
    raised = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).double().nan_to_num(0.0)
    levels = dynamic_map(signed)
    borders = (levels[1:] + levels[:-1]) / 2 - 1e-12  # ties go up, whatever the rounding of the midpoint
    return torch.bucketize(raised / _RAISED, borders).to(torch.uint8)


def _zero_code(signed: bool) -> int:
    return int((dynamic_map(signed) == 0).nonzero())


def _blocked(x: Tensor) -> Tensor:
    """View x as [rows, blocks, WIDTH], or [rows, 1, columns] for less than a block."""
    return x.unflatten(1, (-1, WIDTH)) if x.size(1) % WIDTH == 0 else x.unsqueeze(1)


def _quantise(x: Tensor, scales: Tensor, nearest: Tensor) -> Tensor:
    """Return the codes [rows, columns] of ``x`` with block ``scales`` [rows, blocks]; ``nearest`` is from `_codes`."""
    scales = (scales / _RAISED).clamp(min=torch.finfo(x.dtype).tiny)
    bits = (_blocked(x) / scales.unsqueeze(-1)).to(torch.float16).view(torch.int16).int() & 0xFFFF
    return nearest.index_select(0, bits.reshape(-1)).view(x.shape)  # on the CPU ten times faster than [bits]


def _dequantise(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Return the values [rows, columns] of codes; ``levels`` is from `dynamic_map`."""
    values = levels.index_select(0, codes.int().reshape(-1)).view(codes.shape)
    return _blocked(values).mul_(scales.unsqueeze(-1)).view(codes.shape)
