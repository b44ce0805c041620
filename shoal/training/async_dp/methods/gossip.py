"""Stochastic gradient push: each step, a replica sends half of its values to a peer (Assran et al. 2019, algorithm 1).

A replica has numbers x and a push-sum weight w. It steps its optimizer on z = x / w, adds the change to x, then keeps
half of (x, w) and adds the other half to the inbox of its peer in this step, on the directed exponential graph. The
sums of all x and of all w, inboxes included, are invariant (push-sum, Kempe et al. 2003), and z converges to the mean
over replicas even if messages are late and the push-sum weights therefore unequal.

A replica waits only for the message of ``staleness`` steps ago (overlap SGP, algorithm 2), from one neighbour; with
staleness 0 also until its previous message to that peer was read. The x and w of a dead replica are lost, and the
others continue without it. As they do not all observe the death in the same step, from then on no replica waits for an
inbox: each reads what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import Method


class Push(Method):
    """Stochastic gradient push of one replica; messages are at most ``staleness`` steps late. See `Method`."""

    def __init__(self, window: Window, flat: Flat, optimizer: Rule, *, staleness: int):
        super().__init__(window, flat, optimizer)
        self.late, self.slots, n = staleness, hops(self.replicas), self.replicas
        self.x, self.w = [weights.clone() for weights in flat.weights], 1.0
        self.inboxes = [[self.shared() for _ in range(self.slots)] for _ in range(n)]
        self.inbox_w = window.tensor(n * self.slots, torch.float64).view(n, self.slots)
        # Number of steps that each replica has posted; number of messages in each inbox; inbox locks.
        self._posted, self._held, self._locks = (
            window.counters(n), window.counters(n * self.slots), window.locks(n * self.slots)
        )

    def _box(self, replica: int, slot: int) -> int:
        return replica * self.slots + slot

    @torch.no_grad()
    def update(self, step: int, rate: float, tokens: float) -> None:
        """Step the optimizer on z, then push and receive."""
        self.optimizer.step(rate)
        for x, z in zip(self.x, self.flat.weights, strict=True):
            x.add_(z - x / self.w)
        self.gossip(step)

    @torch.no_grad()
    def gossip(self, step: int) -> None:
        """Exchange (x, w) once and compute z."""
        living = self.window.living()
        ordered = self.late == 0 and len(living) == self.replicas
        if len(living) > 1:
            to, _ = exponential(step, self.replica, living)
            slot = step % hops(len(living))
            if ordered:  # one message at a time, so that the result does not depend on timing
                box = self._held + self._box(to, slot)
                self.window.until(lambda: self.window.get(box) == 0 or self.window.living() != living)
            self._push(to, slot)
        self.window.set(self._posted + self.replica, step + 1)
        due = step - self.late
        if len(living) > 1 and due >= self._first:
            _, source = exponential(due, self.replica, living)
            self.wait_for(source, self._posted + source, due + 1)
        self._take([step % self.slots] if ordered else range(self.slots))
        for x, z in zip(self.x, self.flat.weights, strict=True):
            torch.div(x, self.w, out=z)

    def _push(self, to: int, slot: int) -> None:
        box = self._box(to, slot)
        self.w /= 2
        with self.window.lock(self._locks + box):
            for x, inbox in zip(self.x, self.inboxes[to][slot], strict=True):
                x.div_(2)
                inbox.add_(x)
            self.inbox_w[to, slot] += self.w
            self.window.set(self._held + box, self.window.get(self._held + box) + 1)

    def _take(self, slots: Iterable[int]) -> None:
        for slot in slots:
            box = self._box(self.replica, slot)
            if not self.window.get(self._held + box):
                continue
            with self.window.lock(self._locks + box):
                for x, inbox in zip(self.x, self.inboxes[self.replica][slot], strict=True):
                    x.add_(inbox)
                    inbox.zero_()
                self.w += float(self.inbox_w[self.replica, slot])
                self.inbox_w[self.replica, slot] = 0
                self.window.set(self._held + box, 0)

    def settle(self, group: Group | None) -> None:
        """Set the weights to the mean of all replicas, sum of x / sum of w."""
        self._take(range(self.slots))
        total = torch.tensor([self.w], dtype=torch.float64)
        all_reduce(total, group)
        for x, z in zip(self.x, self.flat.weights, strict=True):
            all_reduce(x, group)
            z.copy_(x.div_(float(total)))
        self.w = 1.0

    def start(self, step: int) -> None:
        self._first, self.w = step, 1.0
        torch._foreach_copy_(self.x, self.flat.weights)
        self.window.set(self._posted + self.replica, step)


def exponential(step: int, rank: int, ranks: Sequence[int]) -> tuple[int, int]:
    """Return the rank that ``here`` sends to in a step, and the one that it receives from.

    The directed exponential graph with one peer per step (Assran et al. 2019, section 3 and appendix A): hops of 1, 2,
    4, ... in cyclic order, so that after ceil(log2 n) steps every rank has received information from every other.

    >>> [exponential(step, 0, range(8)) for step in range(4)]
    [(1, 7), (2, 6), (4, 4), (1, 7)]
    """
    n, place = len(ranks), ranks.index(rank)
    hop = 1 << (step % hops(n))
    return ranks[(place + hop) % n], ranks[(place - hop) % n]


def hops(ranks: int) -> int:
    """Return the number of different hops of the exponential graph, at least 1."""
    return max(1, (ranks - 1).bit_length())
