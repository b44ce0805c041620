"""Base classes of relaxed data-parallel methods: checkpoint states, shared memory, staleness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.training.async_dp.methods.flat import Flat

States = dict[str, dict[str, list[Piece]]]
"""Checkpoint pieces by kind of state and parameter name."""


@dataclass
class MethodStates:
    """Everything that a method keeps besides the weights.

    Attributes:
        common: states that are equal on all replicas.
        spread: this replica's part of states that are spread over the replicas.
        own: states of this replica only.
        served: optimizer states that all replicas share.
    """

    common: States = field(default_factory=dict)
    spread: States = field(default_factory=dict)
    own: States = field(default_factory=dict)
    served: States = field(default_factory=dict)


@dataclass
class Staleness:
    """Number of other replicas' updates between computing a gradient and applying it.

    Attributes:
        total, most: sum and maximum of the staleness over these updates.
    """

    updates: int = 0
    total: float = 0.0
    most: int = 0

    def add(self, mean: float, most: int) -> None:
        self.updates += 1
        self.total += mean
        self.most = max(self.most, most)


class Method(ABC):
    """Base class of methods in which a replica does not wait for all others.

    Args:
        window: memory shared by the replicas; all must construct their methods in the same order.

    Attributes:
        together: whether all replicas make each step together.
        clips: whether the engine clips this replica's gradient by its own norm.
        staleness: measured staleness, for methods that define it.
        loss: this replica's loss in the current step, summed over its tokens [nats].
        made: saved number of optimizer updates; differs between replicas that do different numbers of steps.
    """

    clips, together = True, False

    def __init__(self, window: Window, flat: Flat, optimizer: Rule):
        self.window, self.flat, self.optimizer = window, flat, optimizer
        self.replica, self.replicas = window.index, window.size
        self.staleness = Staleness()
        self.loss = 0.0
        self.made = torch.zeros(1, dtype=torch.int64)

    def before(self, step: int) -> bool:
        """Wait if the method requires it and refresh the weights; return whether they changed."""
        return False

    def wait_for_totals(self, step: int) -> tuple[float | None, float] | None:
        """Wait for a step of all replicas; return its loss (None without targets) and gradient norm, before clipping.

        Returns None if the replicas do not make steps together.
        """
        return None

    @abstractmethod
    def update(self, step: int, rate: float, tokens: float) -> None:
        """Apply this replica's gradients, which are means over ``tokens``."""

    def settle(self, group: Group | None) -> None:
        """Set the weights to the run's common weights. Called when all living replicas have met."""
        return

    def start(self, step: int) -> None:
        """Start after ``step`` steps. Called when all replicas have loaded weights and states, before any continues."""
        return

    def states(self) -> MethodStates:
        """Return the optimizer's states and its number of updates, which each replica keeps separately."""
        self.made.fill_(self.optimizer.count)
        return MethodStates(own=self.optimizer.states() | self.updates())

    def updates(self) -> States:
        return {"updates": {"made": [Piece.full(self.made)]}}

    def restored(self) -> None:
        """Continue from loaded states."""
        self.optimizer.resume_at(int(self.made))

    def wait_for(self, other: int, counter: int, value: int) -> None:
        """Wait until a counter reaches a value or the replica that increments it is dead."""
        self.window.until(lambda: self.window.get(counter) >= value or not self.window.alive(other))

    def shared(self, like: list[Tensor] | None = None) -> list[Tensor]:
        """Allocate zeros in the window, in the layout of the weights and the dtype of ``like`` (default: theirs)."""
        return self.flat.slices(self.window.tensor(self.flat.numel, (like or self.flat.weights)[0].dtype))


def move_weights(shards: Shards, old: list[Tensor], new: list[Tensor]) -> Shards:
    """Return the shards with their weights, views of the flat tensors ``old``, moved to views of ``new``."""
    def move(weights: Tensor) -> Tensor:
        for source, target in zip(old, new, strict=True):
            start = (weights.data_ptr() - source.data_ptr()) // source.element_size()
            if 0 <= start < source.numel() or (start == source.numel() == 0):
                return target[start : start + weights.numel()]
        raise ValueError("the shard is in none of the old tensors")

    return replace(shards, shards=[replace(shard, weights=move(shard.weights)) for shard in shards.shards])
