"""AdamW with block-wise quantised 8-bit moments (Dettmers et al. 2022, "8-bit Optimizers")."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.kernels.adam8bit import (
    WIDTH,
    adam8bit_,
    adam8bit_reference,
    dynamic_map,
    nearest_codes,
    quantise,
    zero_code,
)
from shoal.engine.models.initial import positions, stream_key
from shoal.engine.optim.low_precision_state import adamw_beside
from shoal.engine.optim.rule import BLOCK, Rule, to_pieces
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.spec.config import OptimizerConfig

_SMALLEST = 4096  # parameters with fewer elements keep full-precision moments, as in the authors' code
_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Tile:
    """Part of a shard: a matrix whose rows have the same block boundaries.

    Attributes:
        weights, gradient: [rows, columns], views of the shard.
        codes: [rows, columns] uint8, views of the first and second moments.
        scales: [rows, blocks] for each moment, the largest absolute value in a block.
        box: the blocks, in the parameter's shape with the last dim counted in blocks.
        block_shape: that shape.
        starts: whether it has the first element of its blocks, and therefore saves them.
        places: [rows] position of each row's first element in the unsharded parameter, if weights are bfloat16.
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
    places: Tensor
    shared: Tensor | None = None

    def rows(self) -> Iterator[slice]:
        """Return slices of rows that fit in the caches; all rows on a GPU."""
        rows, columns = self.weights.shape
        many = max(1, BLOCK // columns) if self.weights.device.type == "cpu" else rows
        return (slice(start, start + many) for start in range(0, rows, many))


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
            for zero in (zero_code(signed=True), zero_code(signed=False))
        ]
        self.tiles = [
            (shard, tile)
            for i, shard in enumerate(self.large.shards)
            for part in shard.parts
            for tile in _tiles(shard, part, [codes[i] for codes in self.codes], self.exact)
        ]
        self.blocks_shared = self._share()
        self.levels = torch.stack([dynamic_map(signed) for signed in (True, False)]).to(shards.device, self.exact)
        self.nearest = torch.stack([nearest_codes(signed) for signed in (True, False)]).to(shards.device)
        self.fused = shards.device.type == "cuda" and self.exact == torch.float32
        self.skips_on_device = self.fused and not self.blocks_shared

    def _share(self) -> int:
        """Agree with the other holders on the blocks that are split between ranks; return their number."""
        mine = {id(tile): _keys(tile) for _, tile in self.tiles if not _is_complete(tile)}
        found = self.shards.holders.collect([key for keys in mine.values() for key in keys])
        place = {key: i for i, key in enumerate(sorted({tuple(key) for keys in found for key in keys}))}
        for _, tile in self.tiles:
            if id(tile) in mine:
                tile.shared = torch.tensor([place[key] for key in mine[id(tile)]], device=self.shards.device)
        return len(place)

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        if not self.fused or self.blocks_shared:  # shared blocks take several operations, which a skip would undo
            super().apply(learning_rate, scale, skip)
            return
        self.small.step(learning_rate, scale, skip)
        device = self.shards.device
        factor = scale.float() if isinstance(scale, Tensor) else torch.full((), scale, device=device)
        skipped = torch.zeros((), device=device) if skip is None else skip.float()
        for shard, tile in self.tiles:
            self._update(shard, tile, learning_rate, factor, skipped)

    def update(self, learning_rate: float) -> None:
        self.small.step(learning_rate)
        table = torch.zeros(2, self.blocks_shared, dtype=self.exact, device=self.shards.device)
        waiting: list[tuple[_Tile, Tensor]] = []
        one, none = table.new_ones(()), table.new_zeros(())
        for shard, tile in self.tiles:
            moments = self._update(shard, tile, learning_rate, one, none)
            if tile.shared is not None:  # one block per row
                waiting.append((tile, moments))
                for known, moment in zip(table, moments, strict=True):  # tiles may share a block
                    known[tile.shared] = torch.maximum(known[tile.shared], moment.abs().amax(1))
        if self.blocks_shared:
            self.shards.holders.maximum(table)
        for tile, moments in waiting:
            for i, (known, moment) in enumerate(zip(table, moments, strict=True)):
                scales = known[tile.shared, None]
                tile.scales[i].copy_(scales)
                tile.codes[i].copy_(quantise(moment, scales, self.nearest[i]))

    def _update(self, shard: Shard, tile: _Tile, learning_rate: float, scale: Tensor, skip: Tensor) -> Tensor:
        """Update a tile; return the moments [2, rows, columns] if its blocks are split, else []."""
        shared = tile.shared is not None
        moments = tile.weights.new_empty((2, *tile.weights.shape) if shared else 0, dtype=self.exact)
        key = stream_key(self.seed, f"{tile.part.name}:weights:{self.count}")
        beta1, beta2 = self.config.betas
        numbers: dict[str, Any] = {
            "rate": learning_rate * shard.rate, "decay": shard.decay, "beta1": beta1, "beta2": beta2,
            "eps": self.config.eps, "count": self.count,
        }  # fmt: skip
        operation: Callable[..., None] = adam8bit_ if self.fused else adam8bit_reference
        others = (scale, skip, key) if self.fused else (key,)
        for rows in [slice(None)] if self.fused or shared else tile.rows():
            operands: list[Any] = [x[rows] for x in (tile.weights, tile.gradient, *tile.codes, *tile.scales)]
            operands += [self.levels, self.nearest, tile.places[rows], moments]
            operation(*operands, *others, **numbers)
        return moments

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
        places = torch.empty(0, dtype=torch.int64, device=weights.device)
        if weights.dtype != exact:
            places = positions(Box((*leading, start), (*heights, 1)), part.global_shape, weights.device).flatten()
        yield _Tile(
            weights, gradient, tile_codes, scales, Box((*leading, first), (*heights, last - first)), block_shape, part,
            starts=start % WIDTH == 0, places=places,
        )


def _is_complete(tile: _Tile) -> bool:
    """Return whether a tile has all elements of its blocks; the last block of a row may be short."""
    first, blocks = tile.box.offset[-1], tile.box.shape[-1]
    return tile.starts and tile.weights.size(1) == min(blocks * WIDTH, tile.part.global_shape[-1] - first * WIDTH)


def _keys(tile: _Tile) -> list[tuple[str, int]]:
    """Return the keys of each row's only block: the parameter, and the block's index in it."""
    numbers = torch.arange(math.prod(tile.block_shape)).view(tile.block_shape)[tile.box.slices].flatten()
    return [(tile.part.name, number) for number in numbers.tolist()]
