"""An update rule, and how element-wise ones go over flat shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from shoal.config import OptimizerConfig
from shoal.optim.shards import Shard, Shards, like
from shoal.pieces import Piece

BLOCK = 1 << 17  # elements: with a few states they stay in the caches from one operation to the next


class Rule(ABC):
    """Updates shards of parameters in place from their gradients.

    Args:
        config: hyper-parameters.
        shards: what this rank updates.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        self.config, self.shards = config, shards
        self.count = 0  # updates made

    def step(self, learning_rate: float) -> None:
        """Make one update."""
        self.count += 1
        self.update(learning_rate)

    @abstractmethod
    def update(self, learning_rate: float) -> None:
        """Make update number ``self.count`` (1 is the first)."""

    @abstractmethod
    def states(self) -> dict[str, dict[str, list[Piece]]]:
        """By kind of state and name of parameter, the pieces that this rank holds (views)."""

    def resume_at(self, count: int) -> None:
        """The states were overwritten with those after ``count`` updates."""
        self.count = count

    def bytes(self) -> int:
        """Bytes of the states."""
        tensors = [piece.tensor for kind in self.states().values() for pieces in kind.values() for piece in pieces]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Elementwise(Rule):
    """A rule in which every element is updated by itself, so that any shard will do.

    Subclasses name their `STATES` and give `block`.
    """

    STATES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        self.tensors = {name: like(shards.shards) for name in self.STATES}

    def update(self, learning_rate: float) -> None:
        for i, shard in enumerate(self.shards.shards):
            states = [self.tensors[name][i] for name in self.STATES]
            rate = learning_rate * shard.rate
            for weights, gradient, *values in blocks(shard.weights, shard.gradient, *states):
                self.block(weights, gradient, *values, rate=rate, decay=shard.decay)

    @abstractmethod
    def block(self, weights: Tensor, gradient: Tensor, *states: Tensor, rate: float, decay: float) -> None:
        """Update some elements, and their states, in place."""

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        return {name: named(self.shards.shards, tensors) for name, tensors in self.tensors.items()}


def named(shards: list[Shard], tensors: list[Tensor]) -> dict[str, list[Piece]]:
    """By parameter, the pieces of tensors that lie like the shards."""
    pieces: dict[str, list[Piece]] = {}
    for shard, tensor in zip(shards, tensors, strict=True):
        for part in shard.parts:
            pieces.setdefault(part.name, []).append(part.piece(tensor))
    return pieces


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """On the CPU a shard goes through the caches block by block; a GPU takes it whole."""
    if tensors[0].device.type != "cpu":
        yield tensors
    else:
        yield from zip(*(tensor.split(BLOCK) for tensor in tensors), strict=True)
