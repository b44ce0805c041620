"""Local SGD and DiLoCo: replicas train independently for H steps and then average.

Local SGD (Stich 2019): every H steps the weights are averaged. DiLoCo (Douillard et al. 2023, algorithm 1): the
negative mean change over H inner steps is the gradient of an outer optimizer, SGD with Nesterov momentum:

    d = old weights - mean of the replicas' weights
    v = momentum v + d;   weights = old weights - rate (d + momentum v)

Local SGD is the case of rate 1 without momentum. The changes can be exchanged as 8-bit integers in blocks with a scale
each, as in the outer steps of Jaghouar et al. 2024 (INTELLECT-1), using the two phases of `CodedSum`; rounding errors
are added to the next change (error feedback). Each replica keeps its own inner optimizer moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import MethodStates
from shoal.training.async_dp.methods.quantised import CodedSum, Int8


class LocalSteps:
    """Averaging of the weights every ``every`` steps.

    Args:
        group: ranks that hold the same part of each replica; None for one replica.
        every: steps between averages (H).
        rate, momentum: hyperparameters of the outer step.
        int8: quantiser of the exchanged changes; None exchanges them unquantised.
    """

    def __init__(
        self, flat: Flat, group: Group | None, *, every: int, rate: float, momentum: float, int8: Int8 | None
    ):
        self.flat, self.group, self.every, self.rate, self.momentum = flat, group, every, rate, momentum
        self.coded = None if int8 is None else CodedSum(flat, group, int8)
        self.old = [weights.clone() for weights in flat.weights]
        self.velocity = flat.zeros() if momentum else []
        self.errors = [] if int8 is None else flat.zeros()

    def due(self, done: int, steps: int) -> bool:
        """Return whether the replicas average after ``done`` of ``steps`` steps."""
        return done % self.every == 0 or done == steps

    @torch.no_grad()
    def average(self) -> None:
        """Apply the outer step; the result is equal on every replica."""
        changes = [old - weights for weights, old in zip(self.flat.weights, self.old, strict=True)]
        self._sum(changes)
        for i, change in enumerate(changes):
            change /= 1 if self.group is None else self.group.size()
            if self.momentum:
                self.velocity[i].mul_(self.momentum).add_(change)
                change.add_(self.velocity[i], alpha=self.momentum)
            self.flat.weights[i].copy_(self.old[i].sub_(change, alpha=self.rate))

    def _sum(self, changes: list[Tensor]) -> None:
        if self.coded is None:
            for change in changes:
                all_reduce(change, self.group)
            return
        for change, error in zip(changes, self.errors, strict=True):
            change += error
        parts = self.flat.parts
        self.coded.sum([part.view(changes) for part in parts], [part.view(self.errors) for part in parts])

    def restored(self) -> None:
        """Continue from an average that was loaded into the weights."""
        torch._foreach_copy_(self.old, self.flat.weights)

    def states(self) -> MethodStates:
        """Return the outer momentum, and the rounding errors of the changes sent and of the sums served."""
        return MethodStates(
            common={"momentum": self.flat.pieces(self.velocity)} if self.velocity else {},
            spread={"server_error": self.coded.pieces()} if self.coded else {},
            own={"error": self.flat.pieces(self.errors)} if self.errors else {},
        )
