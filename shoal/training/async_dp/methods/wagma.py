"""Wait-avoiding group averaging: in each step a replica averages with a different small group.

Source: Li et al. 2020, "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group
Averaging".

After its own update a replica publishes its weights, and takes the mean of its own and those published by its group; a
late member contributes the weights of an earlier step, up to ``staleness`` steps old. No replica waits for a straggler,
yet its weights still count. Every ``global_every`` steps all replicas average and wait for all; weights published for
such a step stay until all have read them, so that all have the same weights after it.

The groups form a tournament among the living replicas (`tournament`). In the paper one
collective gives all members the same sum, and a late member adds itself afterwards; here each member reads separately,
which gives the same mean if all are in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import Method


class GroupAverage(Method):
    """Group averaging of one replica.

    Args:
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

    def _choose_group(self, step: int) -> tuple[list[int], int]:
        """Return the replicas that average in a step, and the maximum age of their weights in steps."""
        living = self.window.living()
        if self._is_global(step + 1):
            return living, 0
        return next(g for g in tournament(step, living, self.size) if self.replica in g), self.late

    def _is_global(self, version: int) -> bool:
        return self.global_every > 0 and version % self.global_every == 0

    @torch.no_grad()
    def update(self, step: int, rate: float, tokens: float) -> None:
        """Step the optimizer, publish the weights, and average with the group."""
        self.optimizer.step(rate)
        if self._is_global(step - 1):  # the global step whose weights this step overwrites
            for other in range(self.replicas):
                self.wait_for(other, self._read_all + other, step - 1)
        self._publish(step + 1)
        group, late = self._choose_group(step)
        for member in group:
            self.wait_for(member, self._done + member, step + 1 - late)
        members = [member for member in group if self.window.alive(member)]
        total: list[Tensor] = []
        ages = []
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
            torch._foreach_copy_(self.published[self.replica][version % 2], self.flat.weights)
            self.window.set(self._done + self.replica, version)

    def _read(self, member: int, wanted: int) -> tuple[int, list[Tensor]]:
        """Copy a member's weights after ``wanted`` steps, or after the nearest available number of steps."""
        while True:
            newest = self.window.get(self._done + member)
            version = wanted if newest in (wanted, wanted + 1) else newest
            with self.window.lock(self._locks + 2 * member + version % 2):
                if self.window.get(self._done + member) <= version + 1:
                    return version, [memory.clone() for memory in self.published[member][version % 2]]

    def settle(self, group: Group | None) -> None:
        for weights in self.flat.weights:
            all_reduce(weights, group).div_(1 if group is None else group.size())
        self._publish(self.window.get(self._done + self.replica))

    def start(self, step: int) -> None:
        self._publish(step)
        self.window.set(self._read_all + self.replica, step)


def tournament(step: int, ranks: Sequence[int], size: int) -> list[list[int]]:
    """Return the groups of one step, each of ``size`` ranks; the remaining ranks form a smaller group.

    The circle method of round-robin tournaments: ranks sit around a table, all but the first move one seat per step,
    and opposite ranks meet. In n - 1 steps (n if odd) every pair meets once in groups of 2, and at least once in groups
    of a larger even size, which join neighbouring pairs.

    >>> [tournament(step, range(4), 2) for step in range(3)]
    [[[0, 3], [1, 2]], [[0, 2], [3, 1]], [[0, 1], [2, 3]]]
    """
    if size >= len(ranks):
        return [list(ranks)]
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    first, *others = seats
    turn = step % len(others)
    table = [first, *others[len(others) - turn :], *others[: len(others) - turn]]
    half = len(table) // 2
    order = [rank for pair in zip(table[:half], reversed(table[half:]), strict=True) for rank in pair]
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    return [[rank for rank in group if rank is not None] for group in groups]
