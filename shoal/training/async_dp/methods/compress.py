"""Common part of the methods that compress gradients: error feedback.

Each replica adds its residual (its *error*) to its gradient, sends a compressed form, and keeps the difference (Seide
et al. 2014, section 3.2; Karimireddy et al. 2019, algorithm 2). Nothing is lost, only delayed:

    sent + new error = gradient + old error            on every replica, exactly
    gradient of the step = sum of all sent values       the same bits on every replica

Each tensor is compressed separately, so tensors that several tensor-parallel ranks hold stay equal on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shoal.engine.collectives.group import Group
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import MethodStates


class Compressed(ABC):
    """Base class of methods that sum the gradients of the replicas in compressed form.

    Args:
        group: ranks that hold the same part of each replica.

    Attributes:
        errors: residuals not sent yet, one flat tensor per bucket.
    """

    def __init__(self, flat: Flat, group: Group | None):
        self.flat, self.group = flat, group
        self.errors = flat.zeros()
        self.tensors = [part.view(flat.gradients) for part in flat.parts]
        self.error_views = [part.view(self.errors) for part in flat.parts]

    @torch.no_grad()
    def sum(self) -> None:
        """Replace the gradients by the sums of the values that the replicas sent."""
        torch._foreach_add_(self.flat.gradients, self.errors)
        self.exchange()

    @abstractmethod
    def exchange(self) -> None:
        """Replace each of `tensors` by its compressed sum, and its `error_views` by the residual."""

    def states(self) -> MethodStates:
        """Return the states that a checkpoint stores."""
        return MethodStates(own={"error": self.flat.pieces(self.errors)})
