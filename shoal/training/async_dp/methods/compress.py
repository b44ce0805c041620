"""Gradients exchanged in compressed form: what all of these methods share.

Each replica adds what it did not send before (its *error*) to its gradient, sends a compressed form, and keeps the
difference: error feedback (Seide et al. 2014, section 3.2; Karimireddy et al. 2019, algorithm 2). So nothing is lost,
only late:

    sent + new error = gradient + old error            on every replica, exactly
    gradient of the step = sum of what all have sent    the same bits on every replica

Every tensor is compressed by itself: what tensor parallelism holds on several ranks then stays equal on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.training.async_dp.methods.flat import Flat


class Compressed(ABC):
    """Sums the gradients of the replicas, compressed.

    Args:
        flat: this replica's parameters.
        group: the ranks that hold the same part of each replica.

    Attributes:
        errors: what was not sent yet, one flat tensor for each bucket.
    """

    def __init__(self, flat: Flat, group: Group | None):
        self.flat, self.group = flat, group
        self.errors = flat.zeros()
        self.tensors = [part.of(flat.gradients) for part in flat.parts]
        self.error_of = [part.of(self.errors) for part in flat.parts]

    @torch.no_grad()
    def sum(self) -> None:
        """Replace the gradients by the sums over the replicas of what they sent."""
        for gradients, errors in zip(self.flat.gradients, self.errors, strict=True):
            gradients.add_(errors)
        self.exchange()

    @abstractmethod
    def exchange(self) -> None:
        """Replace each of `tensors` by the sum of what was sent of it, and `error_of` it by what was not."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place, as one message."""
        if not tensors:
            return
        total = torch.cat([tensor.reshape(-1) for tensor in tensors])
        all_reduce(total, self.group)
        for tensor, summed in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view(tensor.shape))

    def own_states(self) -> dict[str, dict[str, list[Piece]]]:
        """What must be saved of each replica for itself, by kind and name of parameter."""
        return {"error": self.flat.pieces(self.errors)}

    def common_states(self) -> dict[str, dict[str, list[Piece]]]:
        """What all replicas have alike."""
        return {}

    def spread_states(self) -> dict[str, dict[str, list[Piece]]]:
        """Of what the replicas have together, this one's part."""
        return {}

    @staticmethod
    def bytes(elements: int, itemsize: int, ranks: int) -> int:
        """That each rank keeps besides its parameters and gradients, at least.

        Args:
            elements: of its parameters.
            itemsize: of one of them.
            ranks: replicas.
        """
        return elements * itemsize
