"""Float32 updates by an element-wise rule of weights, gradients and states stored in lower precision.

A weight in bfloat16 has 8 bits of precision. Rounding to nearest loses an update of less than half a unit in the last
place, in every step. Rounded up with a probability equal to its fraction of the last place, it is correct on average
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 2.1).

The random bits depend on (seed, name, number of the update, index) only, like initial weights: every layout rounds
equally, and a resumed run continues with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from shoal.base.boxes import Box, flat_range
from shoal.engine.kernels.adamw import adamw_
from shoal.engine.kernels.rounding import draw_bits, round_stochastically
from shoal.engine.models.initial import positions, stream_key
from shoal.engine.optim.from_torch import FromTorch
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.streams import to_device
from shoal.spec.config import OptimizerConfig

_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements converted to float32 at a time

TILE = 1 << 14  # elements of one program of the fused kernel
_KINDS = ("weights", "exp_avg", "exp_avg_sq")

Make = Callable[[OptimizerConfig, Shards], Rule]


@dataclass
class Scratch:
    """Float32 copies of some elements, the rule that updates them, and views of its states by kind."""

    weights: Tensor
    gradient: Tensor
    rule: Rule
    states: dict[str, Tensor]


class Float32Rule(Rule):
    """Update blocks of elements in float32 with another rule, and round values stored in bfloat16.

    A parameter therefore takes no more memory than its formats need, except for one block per device. Weights and
    states are rounded stochastically.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards, make: Make, *, state: torch.dtype, seed: int):
        super().__init__(config, shards)
        self.seed, self.size = seed, _BLOCK[shards.device.type]
        self.blocks = {
            (shard.decay, shard.rate): self._block(make, shard.decay, shard.rate)
            for shard in shards.shards or [Shard(torch.empty(0), torch.empty(0))]
        }
        kinds = next(iter(self.blocks.values())).states
        self.tensors = {kind: shards.zeros(state) for kind in kinds}

    def _block(self, make: Make, decay: float, rate: float) -> Scratch:
        shape, device = (self.size,), self.shards.device
        weights, gradient = torch.zeros(2, self.size, device=device)
        part = ShardPart("", shape, Box.full(shape), 0)
        rule = make(self.config, Shards({"": shape}, [Shard(weights, gradient, (part,), decay, rate)], device=device))
        return Scratch(weights, gradient, rule, {kind: pieces[""][0].tensor for kind, pieces in rule.states().items()})

    def update(self, learning_rate: float) -> None:
        for i, shard in enumerate(self.shards.shards):
            block = self.blocks[shard.decay, shard.rate]
            kept = {kind: tensors[i] for kind, tensors in self.tensors.items()}
            for start in range(0, shard.weights.numel(), self.size):
                some = slice(start, min(start + self.size, shard.weights.numel()))
                self._update(shard, some, block, kept, learning_rate)

    def _update(self, shard: Shard, some: slice, block: Scratch, kept: dict[str, Tensor], learning_rate: float) -> None:
        n = some.stop - some.start
        pairs = [(shard.weights, block.weights, "weights"), *((kept[k], block.states[k], k) for k in kept)]
        for narrow, wide, _ in pairs:
            wide[:n].copy_(narrow[some])
        block.gradient[:n].copy_(shard.gradient[some])
        block.rule.resume_at(self.count - 1)
        block.rule.step(learning_rate)
        for narrow, wide, kind in pairs:
            if narrow.dtype == torch.bfloat16:
                round_stochastically(narrow[some], wide[:n], self._bits(shard, some, kind))
            else:
                narrow[some].copy_(wide[:n])

    def _bits(self, shard: Shard, some: slice, kind: str) -> Tensor:
        """Draw random bits for some elements of a shard; 0 for padding."""
        bits = torch.zeros(some.stop - some.start, dtype=torch.int32, device=shard.weights.device)
        for part in shard.parts:
            first, last = max(some.start, part.start), min(some.stop, part.start + part.box.numel)
            key = stream_key(self.seed, f"{part.name}:{kind}:{self.count}") if first < last else 0
            for offset, box in flat_range(part.box.shape, first - part.start, last - part.start):
                at = first - some.start + offset
                where = positions(box.to_global(part.box), part.global_shape, bits.device)
                bits[at : at + box.numel] = draw_bits(key, where.flatten())
        return bits


class FusedAdam(Rule):
    """`Float32Rule` with "adam" or "adamw" on CUDA: the same states and random bits, in one kernel per shard without
    float32 copies.

    Args:
        decoupled: whether weight decay is AdamW's.
    """

    skips_on_device = True

    def __init__(self, config: OptimizerConfig, shards: Shards, *, decoupled: bool, state: torch.dtype, seed: int):
        super().__init__(config, shards)
        self.decoupled, self.seed = decoupled, seed
        self.tensors = {kind: shards.zeros(state) for kind in _KINDS[1:]}
        self.parts = [[part.name for part in shard.parts] for shard in shards.shards]
        tiles = [[*_tiles(shard)] for shard in shards.shards]
        self.aligned = [all(start % 16 == 0 and stop % 16 == 0 for start, stop, *_ in each) for each in tiles]
        self.tiles = [torch.tensor(each, dtype=torch.int64, device=shards.device).view(-1, 7) for each in tiles]

    @staticmethod
    def suits(name: str, shards: Shards, state: torch.dtype) -> bool:
        """Return whether a rule with this name and format of states runs as this kernel."""
        formats = {state, *(x.dtype for shard in shards.shards for x in (shard.weights, shard.gradient))}
        narrow = torch.bfloat16 in formats and formats <= {torch.bfloat16, torch.float32}
        return name in ("adam", "adamw") and shards.device.type == "cuda" and narrow

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        device, (beta1, beta2) = self.shards.device, self.config.betas
        factor = scale.float() if isinstance(scale, Tensor) else torch.full((), scale, device=device)
        skip = torch.zeros((), device=device) if skip is None else skip.float()
        keys = [
            [(stream_key(self.seed, f"{name}:{kind}:{self.count}") & 0xFFFFFFFF) for kind in _KINDS]
            for parts in self.parts for name in parts
        ]  # fmt: skip
        table = to_device(torch.tensor(keys, dtype=torch.uint32).view(torch.int32).view(-1, 3), device)
        for i, (shard, mine) in enumerate(zip(self.shards.shards, table.split([*map(len, self.parts)]), strict=True)):
            adamw_(
                shard.weights, shard.gradient, *(self.tensors[kind][i] for kind in _KINDS[1:]), self.tiles[i], mine,
                factor, skip, learning_rate * shard.rate, shard.decay, beta1, beta2, self.config.eps, self.count,
                self.decoupled, self.aligned[i],
            )

    def update(self, learning_rate: float) -> None:
        self.apply(learning_rate, 1.0, None)


def adamw_beside(config: OptimizerConfig, shards: Shards, seed: int = 0) -> Rule:
    """Build AdamW for the parameters that another rule does not update; it computes in float32 for any format of
    weights and gradients. ``seed`` is of the rounding of weights in bfloat16.
    """
    make, exact = partial(FromTorch, name="adamw"), torch.promote_types(shards.dtype, torch.float32)
    if FusedAdam.suits("adamw", shards, exact):
        return FusedAdam(config, shards, decoupled=True, state=exact, seed=seed)
    if all(x.dtype == exact for shard in shards.shards for x in (shard.weights, shard.gradient)):
        return make(config, shards)
    return Float32Rule(config, shards, make, state=exact, seed=seed)


# ---- tiles of the fused kernel ----------------------------------------------------------------------------------


def _tiles(shard: Shard) -> Iterator[tuple[int, ...]]:
    """Yield the rows of `shoal.engine.kernels.adamw`'s table for a shard."""
    for index, part in enumerate(shard.parts):
        start = part.start
        for rows, base, width, stride in matrices(part):
            for first in range(0, rows * width, TILE):
                row, column = divmod(first, width)
                stop = min(first + TILE, rows * width)
                if rows == 1:  # so that the row is less than 2^31 elements wide
                    yield start + first, start + stop, base + column, 0, TILE, 0, index
                else:
                    yield start + first, start + stop, base + row * stride, column, width, stride, index
            start += rows * width


def matrices(part: ShardPart) -> Iterator[tuple[int, int, int, int]]:
    """Split a part, in order, into matrices whose rows are contiguous in the parameter and equally far apart.

    Yields:
        (rows, position of the first element in the parameter, width of a row, distance between rows).
    """
    shape, offset, full = part.box.shape, part.box.offset, part.global_shape
    strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
    inner = len(full) - 1  # the last dim of which a row has more than one element
    while inner > 0 and shape[inner] == full[inner]:
        inner -= 1
    outer = max(0, inner - 1)  # rows lie along these dims
    while 0 < outer < inner and shape[outer] == full[outer]:
        outer -= 1
    base = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    width, stride = math.prod(shape[inner:]), strides[inner - 1] if inner else 0
    for place in product(*map(range, shape[:outer])):
        moved = sum(at * stride for at, stride in zip(place, strides, strict=False))
        yield math.prod(shape[outer:inner]), base + moved, width, stride
