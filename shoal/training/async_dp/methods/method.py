"""Base classes of relaxed data-parallel methods: checkpoint states, shared memory, staleness."""

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
"""Checkpoint pieces by kind of state and parameter name."""


class ReplicaMethod:
    """Base class of methods that synchronise replicas. Its states are everything that it keeps besides the weights."""

    def common_states(self) -> States:
        """Return states that are equal on all replicas."""
        return {}

    def spread_states(self) -> States:
        """Return this replica's part of states that are spread over the replicas."""
        return {}

    def own_states(self) -> States:
        """Return states of this replica only."""
        return {}


@dataclass
class Staleness:
    """Number of other replicas' updates between computing a gradient and applying it.

    Attributes:
        updates: number of updates by this replica.
        total, most: sum and maximum of the staleness over these updates.
    """

    updates: int = 0
    total: float = 0.0
    most: int = 0

    def add(self, mean: float, most: int) -> None:
        self.updates += 1
        self.total += mean
        self.most = max(self.most, most)


class Method(ReplicaMethod, ABC):
    """Base class of methods in which a replica does not wait for all others.

    Args:
        window: memory shared by the replicas; all must construct their methods in the same order.
        flat: this replica's parameters.
        optimizer: this replica's optimizer.

    Attributes:
        clips: whether the engine clips this replica's gradient by its own norm.
        staleness: measured staleness, for methods that define it.
        made: saved number of optimizer updates; differs between replicas that do different numbers of steps.
    """

    clips = True

    def __init__(self, window: Window, flat: Flat, optimizer: Rule):
        self.window, self.flat, self.optimizer = window, flat, optimizer
        self.replica, self.replicas = window.index, window.size
        self.staleness = Staleness()
        self.made = torch.zeros(1, dtype=torch.int64)

    def before(self, step: int) -> bool:
        """Wait if the method requires it and refresh the weights; return whether they changed."""
        return False

    @abstractmethod
    def update(self, step: int, rate: float, tokens: int) -> None:
        """Apply this replica's gradients, which are means over ``tokens``."""

    def settle(self, group: Group | None) -> None:
        """Set the weights to the run's common weights. Called when all living replicas have met."""
        return

    def start(self, step: int) -> None:
        """Start after ``step`` steps. Called when all replicas have loaded weights and states, before any continues."""
        return

    def served_states(self) -> States:
        """Return the optimizer states that all replicas share."""
        return {}

    def own_states(self) -> States:
        """Return the optimizer's states and its number of updates."""
        self.made.fill_(self.optimizer.count)
        return self.optimizer.states() | {"updates": {"made": [whole(self.made)]}}

    def restored(self) -> None:
        """Continue from loaded states."""
        self.optimizer.resume_at(int(self.made))

    def wait_for(self, other: int, counter: int, value: int) -> None:
        """Wait until a counter reaches a value or the replica that increments it is dead."""
        self.window.until(lambda: self.window.get(counter) >= value or not self.window.alive(other))

    def shared(self, like: list[Tensor] | None = None) -> list[Tensor]:
        """Allocate zeros in the window, in the layout of the weights.

        Args:
            like: tensors that define the dtypes (default: the weights).
        """
        return self.flat.slices(self.window.tensor(self.flat.numel, (like or self.flat.weights)[0].dtype))


def whole(tensor: Tensor) -> Piece:
    """Return a piece that covers an unsharded tensor."""
    shape = tuple(tensor.shape)
    return Piece(shape, Box.whole(shape), tensor)


def move_weights(shards: Shards, old: list[Tensor], new: list[Tensor]) -> Shards:
    """Return the shards with their weights moved to other memory.

    Args:
        old: flat tensors that the weights are views of.
        new: replacements of these tensors.
    """
    def place(weights: Tensor) -> Tensor:
        for source, target in zip(old, new, strict=True):
            start = (weights.data_ptr() - source.data_ptr()) // source.element_size()
            if 0 <= start < source.numel() or (start == source.numel() == 0):
                return target[start : start + weights.numel()]
        raise ValueError("the shard lies in none of the old tensors")

    return replace(shards, shards=[replace(shard, weights=place(shard.weights)) for shard in shards.shards])
