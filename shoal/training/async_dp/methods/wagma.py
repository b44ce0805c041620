"""Wait-avoiding group averaging: in each step a replica averages with a different small group.

Source: Li et al. 2020, "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group
Averaging".

After its own update a replica publishes its weights, and takes the mean of its own and those published by its group; a
late member contributes the weights of an earlier step, up to ``staleness`` steps old. No replica waits for a straggler,
yet its weights still count. Every ``global_every`` steps all replicas average and wait for all; weights published for
such a step stay until all have read them, so that all have the same weights after it.

The groups form a tournament among the living replicas (`shoal.training.async_dp.methods.groups`). In the paper one
collective gives all members the same sum, and a late member adds itself afterwards; here each member reads separately,
which gives the same mean if all are in time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.groups import tournament
from shoal.training.async_dp.methods.method import Method


class GroupAverage(Method):
    """Group averaging of one replica.

    Args:
        window, flat, optimizer: see `Method`.
        size: group size.
        staleness: maximum age in steps of the weights read.
        global_every: steps between averages over all replicas; 0 disables them.
    """

    def __init__(
        self, window: Window, flat: Flat, optimizer: Rule, *, size: int, staleness: int, global_every: int
    ):
        super().__init__(window, flat, optimizer)
        self.size, self.late, self.global_every = size, staleness, global_every
        # Two copies per replica, so that one can be read while the next step's is written.
        self.published = [[self.shared() for _ in range(2)] for _ in range(self.replicas)]
        # By replica, the number of steps published, and the last global step read.
        self._done, self._read_all = window.counters(self.replicas), window.counters(self.replicas)
        self._locks = window.locks(2 * self.replicas)

    def group_of(self, step: int) -> tuple[list[int], int]:
        """Return the replicas that average in a step, and the maximum age of their weights in steps."""
        living = self.window.living()
        if self._is_global(step + 1):
            return living, 0
        return next(g for g in tournament(step, living, self.size) if self.replica in g), self.late

    def _is_global(self, version: int) -> bool:
        return self.global_every > 0 and version % self.global_every == 0

    @torch.no_grad()
    def update(self, step: int, rate: float, tokens: int) -> None:
        """Step the optimizer, publish the weights, and average with the group."""
        self.optimizer.step(rate)
        if self._is_global(step - 1):  # the global step whose weights this step overwrites
            for other in range(self.replicas):
                self.wait_for(other, self._read_all + other, step - 1)
        self._publish(step + 1)
        group, late = self.group_of(step)
        members = [self.replica]
        ages = []
        for member in group:
            if member == self.replica:
                continue
            self.wait_for(member, self._done + member, step + 1 - late)
            if self.window.alive(member):
                members.append(member)
        total: list[Tensor] = []
        for member in sorted(members):  # fixed order, so that members who read the same weights get the same bits
            version, weights = self._read(member, step + 1)
            ages.append(max(0, step + 1 - version))
            total = [a.add_(b) for a, b in zip(total, weights, strict=True)] if total else weights
        for mine, summed in zip(self.flat.weights, total, strict=True):
            torch.div(summed, len(members), out=mine)
        if self._is_global(step + 1):
            self.window.set(self._read_all + self.replica, step + 1)
        self.staleness.add(sum(ages) / len(ages), max(ages))

    def _publish(self, version: int) -> None:
        with self.window.lock(self._locks + 2 * self.replica + version % 2):
            for memory, weights in zip(self.published[self.replica][version % 2], self.flat.weights, strict=True):
                memory.copy_(weights)
            self.window.set(self._done + self.replica, version)

    def _read(self, member: int, wanted: int) -> tuple[int, list[torch.Tensor]]:
        """Copy a member's weights after ``wanted`` steps, or after the nearest available number of steps."""
        while True:
            newest = self.window.get(self._done + member)
            version = wanted if newest in (wanted, wanted + 1) else newest
            with self.window.lock(self._locks + 2 * member + version % 2):
                if self.window.get(self._done + member) <= version + 1:
                    return version, [memory.clone() for memory in self.published[member][version % 2]]

    def settle(self, group: Group | None) -> None:
        """Set the weights to the mean of all replicas."""
        for weights in self.flat.weights:
            all_reduce(weights, group).div_(1 if group is None else group.size())
        self._publish(self.window.get(self._done + self.replica))

    def start(self, step: int) -> None:
        self._publish(step)
        self.window.set(self._read_all + self.replica, step)
