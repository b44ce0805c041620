"""Hogwild!: all workers update shared weights without locks (Recht et al. 2011, algorithm 1).

The weights are in one window: forwards read them while others write, and updates read, change and write elements
without synchronisation. Occasionally one of two concurrent updates is lost, which is the price of not waiting. Each
worker has its own optimizer moments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import Method, move_weights


class Hogwild(Method):
    """Hogwild! updates of one worker; ``build`` builds an update rule for given shards. See `Method`."""

    def __init__(self, window: Window, flat: Flat, optimizer: Rule, build: Callable[[Shards], Rule]):
        super().__init__(window, flat, optimizer)
        self._clocks = window.counters(self.replicas)
        shared = self.shared()
        if self.replica == 0:
            torch._foreach_copy_(shared, flat.weights)
        shards = move_weights(optimizer.shards, flat.weights, shared)
        for bucket, memory in zip(flat.parameters.buckets, shared, strict=True):
            if bucket.master.data_ptr() == bucket.full.data_ptr():  # the parameters are views of it
                bucket.full = memory
                for slot in bucket.slots:
                    slot.parameter.data = slot.view(memory)
            bucket.master = memory
        flat.weights = shared
        self.optimizer = build(shards)

    def _others(self) -> int:
        return sum(self.window.get(self._clocks + w) for w in range(self.replicas) if w != self.replica)

    def before(self, step: int) -> bool:
        """Return whether the weights changed; never waits."""
        self._seen = self._others()
        return True

    def update(self, step: int, rate: float, tokens: float) -> None:
        self.optimizer.step(rate)
        stale = self._others() - self._seen
        self.staleness.add(stale, stale)
        clock = self._clocks + self.replica
        self.window.set(clock, self.window.get(clock) + 1)
