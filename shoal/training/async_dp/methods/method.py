"""What the methods of relaxed data parallelism share: states in a checkpoint, shared memory, staleness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.training.async_dp.methods.flat import Flat

States = dict[str, dict[str, list[Piece]]]
"""Pieces by kind of state and name of parameter."""


class ReplicaMethod:
    """Keeps replicas together; its states are what it has besides their weights."""

    def common_states(self) -> States:
        """States that are equal on all replicas."""
        return {}

    def spread_states(self) -> States:
        """This replica's part of states that the replicas have together."""
        return {}

    def own_states(self) -> States:
        """States of this replica alone."""
        return {}


@dataclass
class Staleness:
    """How many updates by others came between computing gradients and using them.

    Attributes:
        updates: of this replica.
        total, most: over them.
    """

    updates: int = 0
    total: float = 0.0
    most: int = 0

    def add(self, mean: float, most: int) -> None:
        """Count one more update."""
        self.updates += 1
        self.total += mean
        self.most = max(self.most, most)


class Method(ReplicaMethod, ABC):
    """One replica's part of a method in which replicas do not wait for all others.

    Args:
        window: memory that the replicas share; all make their methods alike.
        flat: this replica's parameters.
        optimizer: of this replica.

    Attributes:
        clips: whether the engine clips this replica's gradient by its own norm.
        staleness: measured, where it means something.
        made: updates of the optimizer's states, as saved: replicas may do different numbers of steps.
    """

    clips = True

    def __init__(self, window: Window, flat: Flat, optimizer: Rule):
        self.window, self.flat, self.optimizer = window, flat, optimizer
        self.replica, self.replicas = window.index, window.size
        self.staleness = Staleness()
        self.made = torch.zeros(1, dtype=torch.int64)

    def before(self, step: int) -> bool:
        """Wait if the method does, and bring the weights up to date; returns whether they changed."""
        return False

    @abstractmethod
    def update(self, step: int, rate: float, tokens: int) -> None:
        """Use this replica's gradients, means over ``tokens``."""

    def settle(self, group: Group | None) -> None:
        """Set the weights to those of the run. Called when all living replicas have met."""
        return

    def start(self, step: int) -> None:
        """Start after ``step`` steps. Called when all replicas have the weights and states, before any goes on."""
        return

    def served_states(self) -> States:
        """The optimizer's states that all replicas use."""
        return {}

    def own_states(self) -> States:
        """The optimizer's states, and its number of updates."""
        self.made.fill_(self.optimizer.count)
        return self.optimizer.states() | {"updates": {"made": [whole(self.made)]}}

    def restored(self) -> None:
        """Go on from states that were loaded."""
        self.optimizer.resume_at(int(self.made))

    def wait_for(self, other: int, counter: int, value: int) -> None:
        """Wait until a counter has come to a value, or the replica that moves it is dead."""
        self.window.until(lambda: self.window.get(counter) >= value or not self.window.alive(other))

    def shared(self, like: list[Tensor] | None = None) -> list[Tensor]:
        """Zeros in the window, in the layout of the weights.

        Args:
            like: whose dtype they have (default: the weights').
        """
        return self.flat.slices(self.window.tensor(self.flat.numel, (like or self.flat.weights)[0].dtype))


def whole(tensor: Tensor) -> Piece:
    """All of a tensor."""
    shape = tuple(tensor.shape)
    return Piece(shape, Box.whole(shape), tensor)


def move_weights(shards: Shards, old: list[Tensor], new: list[Tensor]) -> Shards:
    """The same shards with their weights in other memory.

    Args:
        old: flat tensors of which the weights are views.
        new: tensors that take their places.
    """
    def place(weights: Tensor) -> Tensor:
        for source, target in zip(old, new, strict=True):
            start = (weights.data_ptr() - source.data_ptr()) // source.element_size()
            if 0 <= start < source.numel() or (start == source.numel() == 0):
                return target[start : start + weights.numel()]
        raise ValueError("the shard lies in none of the old tensors")

    return replace(shards, shards=[replace(shard, weights=place(shard.weights)) for shard in shards.shards])
