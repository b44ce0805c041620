"""Base classes of update rules, and of element-wise rules on flat shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.ops import to_host
from shoal.engine.optim.shards import Shard, Shards
from shoal.engine.streams import Mark, to_device
from shoal.spec.config import OptimizerConfig

BLOCK = 1 << 17  # elements: with a few states, a block stays in the caches between operations


class Rule(ABC):
    """Base class of update rules: updates shards of parameters in place from their gradients.

    Attributes:
        skips_on_device: whether `apply` never reads ``scale`` and ``skip`` on the host.
        tensors: states of each element, by kind: one tensor per shard.
    """

    skips_on_device = False

    def __init__(self, config: OptimizerConfig, shards: Shards):
        self.config, self.shards = config, shards
        self.tensors: dict[str, list[Tensor]] = {}
        self.count = 0  # number of updates so far
        self.reads: list[Mark] = []  # copies of weights or states in flight, such as a checkpoint's

    def step(self, learning_rate: float, scale: Tensor | float = 1.0, skip: Tensor | None = None) -> None:
        """Apply one update.

        Args:
            scale: factor on the gradients. A tensor, [] on the shards' device, is not read by the host.
            skip: float32 []; if it is 1, as after an overflow, weights and states stay unchanged. `count` grows in
                either case; correct it by ``resume_at(count - 1)`` once the skip is known.
        """
        self.wait_for_reads()
        self.count += 1
        self.apply(learning_rate, scale, skip)

    def wait_for_reads(self) -> None:
        """Order later work after the copies in `reads`: call it before any change of weights or states."""
        for mark in self.reads:
            mark.wait()
        self.reads.clear()

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        """Apply update number ``self.count`` to scaled gradients, unless it is skipped.

        Rules that need no pass for ``scale`` and no host for ``skip`` override this.
        """
        if skip is not None and to_host(skip):
            return
        if isinstance(scale, Tensor) and scale.device != self.shards.device:  # weights in host memory
            scale = float(to_host(scale))
        if isinstance(scale, Tensor) or scale != 1:
            for shard in self.shards.shards:
                shard.gradient.mul_(scale)
        self.update(learning_rate)

    @abstractmethod
    def update(self, learning_rate: float) -> None:
        """Apply update number ``self.count`` (1 is the first)."""

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        """Return the pieces of states on this rank as views, by kind of state and name of parameter."""
        return {kind: to_pieces(self.shards.shards, tensors) for kind, tensors in self.tensors.items()}

    def resume_at(self, count: int) -> None:
        """Continue after the states were overwritten with those after ``count`` updates."""
        self.count = count

    def compile(self) -> None:  # noqa: B027
        """Compile subsequent updates; nothing to do for torch's own kernels, which are fused already."""

    def bytes(self) -> int:
        tensors = [piece.tensor for kind in self.states().values() for pieces in kind.values() for piece in pieces]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Elementwise(Rule):
    """Base class of rules that update each element independently, so that any sharding is possible.

    Subclasses define their `STATES` and implement `numbers` and `block`. The numbers are floats for a block of
    elements, and 0-dimensional tensors for the compiled rule.
    """

    STATES: ClassVar[tuple[str, ...]] = ()
    _compiled: Callable[..., None] | None = None

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        self.tensors = {name: shards.zeros() for name in self.STATES}

    def compile(self) -> None:
        self._compiled = torch.compile(self.block, dynamic=True)

    def update(self, learning_rate: float) -> None:
        for i, shard in enumerate(self.shards.shards):
            weights, states = shard.weights, [self.tensors[name][i] for name in self.STATES]
            numbers = self.numbers(learning_rate * shard.rate, shard.decay)
            if self._compiled is not None:  # as tensors, since new float values would trigger recompilation
                as_tensors = to_device(torch.tensor(numbers, dtype=torch.float64), self.shards.device)
                self._compiled(weights, shard.gradient.to(weights.dtype), states, as_tensors.unbind())
                continue
            for some, gradient, *rest in split_blocks(weights, shard.gradient, *states):
                self.block(some, gradient.to(some.dtype), rest, numbers)

    @abstractmethod
    def numbers(self, rate: float, decay: float) -> tuple[float, ...]:
        """Return the scalar arguments of `block`, which depend on the learning rate or the number of the update."""

    @abstractmethod
    def block(
        self, weights: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[float | Tensor]
    ) -> None:
        """Update some elements and their states in place."""


def to_pieces(shards: list[Shard], tensors: list[Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces of tensors with the layout of the shards, by parameter name."""
    pieces: dict[str, list[Piece]] = {}
    for shard, tensor in zip(shards, tensors, strict=True):
        for part in shard.parts:
            pieces.setdefault(part.name, []).append(part.piece(tensor))
    return pieces


def split_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of tensors: cache-sized on the CPU, complete shards on a GPU."""
    if tensors[0].device.type != "cpu":
        yield tensors
    else:
        yield from zip(*(tensor.split(BLOCK) for tensor in tensors), strict=True)
