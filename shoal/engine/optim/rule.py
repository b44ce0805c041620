"""An update rule, and how element-wise ones go over flat shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.optim.shards import Shard, Shards, like
from shoal.spec.config import OptimizerConfig

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


class Compilable(ABC):
    """A rule made of torch's operations, each of which goes over memory: compiled, they do so together."""

    @abstractmethod
    def compile(self) -> None:
        """Compile the updates that are made from now on."""


class Elementwise(Rule, Compilable):
    """A rule in which every element is updated by itself, so that any shard will do.

    Subclasses name their `STATES` and give `numbers` and `block`. The numbers are floats to a block of elements, and
    0-dimensional tensors to the compiled rule.
    """

    STATES: ClassVar[tuple[str, ...]] = ()
    _compiled: Callable[..., None] | None = None

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        self.tensors = {name: like(shards.shards) for name in self.STATES}

    def compile(self) -> None:
        self._compiled = torch.compile(self.block, dynamic=True)

    def update(self, learning_rate: float) -> None:
        for i, shard in enumerate(self.shards.shards):
            weights, states = shard.weights, [self.tensors[name][i] for name in self.STATES]
            numbers = self.numbers(learning_rate * shard.rate, shard.decay)
            if self._compiled is not None:  # as tensors, since it would be compiled anew for other numbers
                as_tensors = torch.tensor(numbers, dtype=torch.float64, device=self.shards.device)
                self._compiled(weights, shard.gradient.to(weights.dtype), states, as_tensors.unbind())
                continue
            for some, gradient, *rest in blocks(weights, shard.gradient, *states):
                self.block(some, gradient.to(some.dtype), rest, numbers)

    @abstractmethod
    def numbers(self, rate: float, decay: float) -> tuple[float, ...]:
        """What `block` takes besides tensors: all that depends on the learning rate or on the number of the update."""

    @abstractmethod
    def block(
        self, weights: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[float | Tensor]
    ) -> None:
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
