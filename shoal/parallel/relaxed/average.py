"""Replicas that train alone for H steps and then average: local SGD and DiLoCo.

Local SGD (Stich 2019): every H steps the weights become their mean. DiLoCo (Douillard et al. 2023, algorithm 1): the
mean change of H inner steps, with its sign turned, is the gradient of an outer optimizer, SGD with Nesterov momentum:

    d = old weights - mean of the replicas' weights
    v = momentum v + d;   weights = old weights - rate (d + momentum v)

Local SGD is that with rate 1 and no momentum. The changes can be exchanged as 8-bit integers, in blocks with a scale of
their own, as in the outer steps of Jaghouar et al. 2024 (INTELLECT-1); what rounding leaves out is added to the next
change (error feedback). The moments of the inner optimizer stay each replica's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.ops import all_gather, all_reduce
from shoal.parallel.relaxed.flat import Flat
from shoal.parallel.relaxed.quantised import Int8
from shoal.pieces import Piece


class LocalSteps:
    """Averages every ``every`` steps.

    Args:
        flat: this replica's parameters.
        group: the ranks that hold the same part of each replica; None for one replica.
        every: steps between averages (H).
        rate, momentum: of the outer step.
        int8: how changes are exchanged as 8-bit integers; None exchanges them as they are.
    """

    def __init__(
        self, flat: Flat, group: Group | None, *, every: int, rate: float, momentum: float, int8: Int8 | None
    ):
        self.flat, self.group, self.every, self.rate, self.momentum = flat, group, every, rate, momentum
        self.int8 = int8
        self.old = [weights.clone() for weights in flat.weights]
        self.velocity = flat.zeros() if momentum else []
        self.errors = flat.zeros() if int8 is not None else []

    def due(self, done: int, steps: int) -> bool:
        """Whether the replicas average after ``done`` steps of ``steps``."""
        return done % self.every == 0 or done == steps

    @torch.no_grad()
    def average(self) -> None:
        """Make the outer step, on every replica alike; the caller makes the parameters whole from the weights."""
        for i, (weights, old) in enumerate(zip(self.flat.weights, self.old, strict=True)):
            change = self._mean(old - weights, i)
            if self.momentum:
                self.velocity[i].mul_(self.momentum).add_(change)
                change.add_(self.velocity[i], alpha=self.momentum)
            old.sub_(change, alpha=self.rate)
            weights.copy_(old)

    def _mean(self, change: Tensor, i: int) -> Tensor:
        replicas = 1 if self.group is None else self.group.size()
        if self.int8 is None:
            return all_reduce(change, self.group).div_(replicas)
        code = self.int8
        change.add_(self.errors[i])
        blocks = torch.nn.functional.pad(change, (0, -change.numel() % code.block)).view(-1, code.block)
        message = code.encode(blocks, blocks != 0)
        self.errors[i].copy_((blocks - code.decode(*message)).view(-1)[: change.numel()])
        every = [all_gather(part, self.group).view(-1, *part.shape) for part in message]
        total = sum(code.decode(*parts) for parts in zip(*every, strict=True))
        return total.view(-1)[: change.numel()].div_(replicas)

    def restored(self) -> None:
        """The weights were overwritten with those of an average."""
        for weights, old in zip(self.flat.weights, self.old, strict=True):
            old.copy_(weights)

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        """What all replicas have alike: the outer momentum."""
        return {"momentum": self.flat.pieces(self.velocity)} if self.velocity else {}

    def own_states(self) -> dict[str, dict[str, list[Piece]]]:
        """What each replica has for itself: the rounding that it did not send."""
        return {"error": self.flat.pieces(self.errors)} if self.errors else {}
