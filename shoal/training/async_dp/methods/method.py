"""What the methods have in common in which a replica does not wait for all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.training.async_dp.methods.flat import Flat


@dataclass
class Staleness:
    """How old the weights were that gradients were computed from: updates by others in between.

    Attributes:
        updates: of this replica.
        total, most: over them.
    """

    updates: int = 0
    total: float = 0.0
    most: int = 0

    def add(self, mean: float, most: int) -> None:
        """One more update."""
        self.updates += 1
        self.total += mean
        self.most = max(self.most, most)


class Method(ABC):
    """One replica's part of a method, between its engine and the window that it shares with the others.

    Args:
        window: of the replicas.
        flat: this replica's parameters.
        optimizer: of this replica.

    Attributes:
        clips: whether the engine clips this replica's gradient by its own norm.
        staleness: measured, where it means something.
        made: updates of the optimizer's states, as they are saved: replicas may do different numbers of steps.
    """

    clips = True

    def __init__(self, window: Window, flat: Flat, optimizer: Rule):
        self.window, self.flat, self.optimizer = window, flat, optimizer
        self.replica, self.replicas = window.index, window.size
        self.staleness = Staleness()
        self.made = torch.zeros(1, dtype=torch.int64)

    def before(self, step: int) -> bool:
        """Wait where the method does, and bring the weights up to date; whether they changed."""
        return False

    @abstractmethod
    def update(self, step: int, rate: float, tokens: int) -> None:
        """Use this replica's gradients, means over ``tokens``; the parameters are made whole after it."""

    def settle(self, group: Group | None) -> None:
        """All living replicas are here: have the weights of all be those that the run stands for."""
        return

    def start(self, step: int) -> None:
        """All replicas have the weights, and the states below, of a run after ``step`` steps; none goes on yet."""
        return

    def own_states(self) -> dict[str, dict[str, list[Piece]]]:
        """What this replica has for itself."""
        self.made.fill_(self.optimizer.count)
        return self.optimizer.states() | {"updates": {"made": [whole(self.made)]}}

    def common_states(self) -> dict[str, dict[str, list[Piece]]]:
        """What all share."""
        return {}

    def restored(self) -> None:
        """The states were overwritten with saved ones."""
        self.optimizer.resume_at(int(self.made))


def whole(tensor: Tensor) -> Piece:
    """All of a tensor."""
    shape = tuple(tensor.shape)
    return Piece(shape, Box.whole(shape), tensor)


def average(flat: Flat, group: Group | None) -> None:
    """Have the weights of all replicas be their mean."""
    replicas = 1 if group is None else group.size()
    for weights in flat.weights:
        all_reduce(weights, group).div_(replicas)


def moved(shards: Shards, old: list[Tensor], new: list[Tensor]) -> Shards:
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


@torch.no_grad()
def share_states(rule: Rule, window: Window) -> None:
    """Have the states of an element-wise rule lie in a window; every replica does the same."""
    seen: dict[int, Tensor] = {}
    for parameters in rule.states().values():
        for pieces in parameters.values():
            for piece in pieces:
                base = piece.tensor if piece.tensor._base is None else piece.tensor._base
                seen.setdefault(base.data_ptr(), base)
    for base in seen.values():
        shared = window.tensor(base.numel(), base.dtype).view(base.shape)
        base.set_(shared)  # type: ignore[call-overload]  # torch takes a tensor too
