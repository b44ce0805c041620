"""The gradients of a bucket: their memory, and how far a backward has come with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group, allocate
from shoal.engine.device import host_zeros
from shoal.engine.parallel.zero.bucket import Bucket, ShardSegment, end_to_end

Term = Callable[[Tensor, bool], object]
"""Adds one gradient, in place, to (the sum so far, whether nothing is in it yet)."""


class Gradients:
    """The gradients of one bucket.

    Args:
        keep_whole: whether whole gradients stay (ZeRO-0 and 1), or have memory only until they are reduced.
        group: whose collectives reduce the whole of them.

    Attributes:
        whole: flat sums over this rank's micro-batches; None while they have no memory.
        shard: this rank's part of the sum over all ranks; a view of ``whole`` where that stays.
        update: what the optimizer reads: ``shard``, or its copy in host memory.
        views: each slot's part of ``whole``.
        terms: gradients that one backward gives: one for each slot, two where a weight is used twice.
        pending_backward: those that the backward under way has yet to produce.
        pending_accumulation: those that are yet to be added, of the backward that is.
        filled: slots of which something was accumulated in ``whole``.
        unreduced: nothing was accumulated in ``shard`` yet.
    """

    def __init__(self, bucket: Bucket, *, keep_whole: bool, group: Group | None):
        self.bucket, self.keep_whole = bucket, keep_whole
        dtype, device = bucket.policy.reduce, bucket.full.device
        self.whole: Tensor | None = None
        self.views: list[Tensor] = []
        if keep_whole:
            whole = allocate(bucket.full.numel(), dtype, device, group)
            self._view(whole)
            self.shard = bucket.mine(whole)
        else:
            self.shard = torch.zeros(bucket.chunk, dtype=dtype, device=device)
        self.update = host_zeros(bucket.chunk, dtype, device) if bucket.offloaded else self.shard
        self.filled: set[int] = set()
        self.unreduced = True
        self._squares: dict[ShardSegment, Tensor] = {}
        self._version = -1  # of ``update``, that they are of
        self.expect({})

    def expect(self, given: Mapping[Tensor, int]) -> None:
        """How many gradients each backward gives of these parameters; of others it gives one."""
        self.terms = sum(given.get(slot.parameter, 1) for slot in self.bucket.slots)
        self.pending_backward = self.pending_accumulation = self.terms

    def begin(self) -> None:
        """Forget the step before."""
        self.filled, self.unreduced = set(), True
        for slot in self.bucket.slots:
            slot.parameter.grad = None

    def add(self, slot: int, term: Term, together: int = 1) -> list[Tensor]:
        """Add a term of the gradient of one parameter, or of so many consecutive matrices as if they were one; returns
        the sums so far."""
        self.make_room()
        views = self.views[slot : slot + together]
        term(end_to_end(views), slot not in self.filled)
        self.filled.update(range(slot, slot + together))
        self.pending_accumulation -= together
        return views

    def make_room(self) -> Tensor:
        """The memory of whole gradients, which they are given if they have none."""
        if self.whole is not None:
            return self.whole
        whole = torch.empty(self.bucket.full.numel(), dtype=self.shard.dtype, device=self.shard.device)
        whole[self.bucket.numel :].zero_()
        self._view(whole)
        return whole

    def take(self) -> tuple[Tensor, Tensor]:
        """What is to be reduced, with zeros where nothing came, and where the sum belongs: (whole, shard).

        The sum is `shard`, or where something was accumulated there before, is yet to be added to it.
        """
        whole, shard = self.make_room(), self.shard
        for i, view in enumerate(self.views):
            if i not in self.filled:  # memory of the step before, or anybody's
                view.zero_()
        if not self.keep_whole:
            self.whole, self.views, self.filled = None, [], set()
            if not self.unreduced:
                shard = torch.empty_like(shard)
        self.unreduced = False
        return whole, shard

    def on_reduced(self) -> None:
        """``shard`` is the sum over all replicas. The norms of what is complete are taken now, while it is in the
        caches and other buckets are on their way."""
        self._squares = {run: _square(self.shard[run.slice]) for run in self.bucket.runs if not run.sum_over}

    def finalise(self) -> None:
        """What was yet to be summed, of numbers whose norms were not taken, is."""
        if self.update is not self.shard:
            self.update.copy_(self.shard)
        self._version = self.update._version

    def square(self, run: ShardSegment) -> Tensor:
        """The squared norm of a part of ``update``, float64: as it was taken, if nothing was changed since."""
        taken = self._squares.get(run) if self.update._version == self._version else None
        return _square(self.update[run.slice]) if taken is None else taken

    def _view(self, whole: Tensor) -> None:
        self.whole = whole
        self.views = [whole[slot.start : slot.stop].view(slot.split.local) for slot in self.bucket.slots]


def _square(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
