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

import torch

from shoal.engine.collectives.group import Group
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import ReplicaMethod, States


class Compressed(ReplicaMethod, ABC):
    """Sums the gradients of the replicas, compressed.

    Args:
        flat: this replica's parameters.
        group: the ranks that hold the same part of each replica.

    Attributes:
        errors: what was not sent yet, one flat tensor for each bucket.
        tensors, error_of: the gradient and the error of each parameter, as views.
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
        """Replace each of `tensors` by the sum of what was sent of it, and its `error_of` by what was not."""

    def own_states(self) -> States:
        """The errors."""
        return {"error": self.flat.pieces(self.errors)}
