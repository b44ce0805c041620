"""Float32 updates by an element-wise rule of weights, gradients and states stored in lower precision.

A weight in bfloat16 has 8 bits of precision. Rounding to nearest loses an update of less than half a unit in the last
place, in every step. Rounded up with a probability equal to its fraction of the last place, it is correct on average
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 2.1).

The random bits depend on (seed, name, number of the update, index) only, like initial weights: every layout rounds
equally, and a resumed run continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece, flat_range
from shoal.engine.models.initial import positions, shift_right, stream_key
from shoal.engine.optim.from_torch import FromTorch
from shoal.engine.optim.rule import Rule, to_pieces
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.spec.config import OptimizerConfig

_LOW = (1 << 16) - 1  # the bits of a float32 beyond bfloat16
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements converted to float32 at a time

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

    Args:
        make: builds the element-wise rule.
        state: dtype of its states.
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

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        return {kind: to_pieces(self.shards.shards, tensors) for kind, tensors in self.tensors.items()}


def adamw_beside(config: OptimizerConfig, shards: Shards, seed: int = 0) -> Rule:
    """Build AdamW for the parameters that another rule does not update; it computes in float32 for any format of
    weights and gradients. ``seed`` is of the rounding of weights in bfloat16.
    """
    make, exact = partial(FromTorch, name="adamw"), torch.promote_types(shards.dtype, torch.float32)
    if all(x.dtype == exact for shard in shards.shards for x in (shard.weights, shard.gradient)):
        return make(config, shards)
    return Float32Rule(config, shards, make, state=exact, seed=seed)


def draw_bits(key: int, positions: Tensor) -> Tensor:
    """Return 32 random bits per int64 position, as int32: Wellons 2018, "Prospecting for Hash Functions" (lowbias32).

    Args:
        key: a `stream_key` of the tensor and the update; its low 32 bits are used.
    """
    x = (positions ^ key).to(torch.int32)
    x = (x ^ shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ shift_right(x, 15)) * (0x846CA68B - (1 << 32))
    return x ^ shift_right(x, 16)


def round_stochastically(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Round float32 ``x`` to bfloat16 ``out``: away from 0 with a probability equal to the fraction of a unit in the
    last place.

    Non-finite values are preserved. ``bits`` are random int32, one per element.
    """
    x = x.nan_to_num(torch.nan, torch.inf, -torch.inf)  # canonical NaN: adding bits keeps it NaN
    rounded = (x.view(torch.int32) + (bits & _LOW)) & ~_LOW
    out.copy_(rounded.view(torch.float32))
