"""Gradient buffers of a bucket, and the progress of a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group, allocate
from shoal.engine.device import host_zeros
from shoal.engine.parallel.zero.bucket import Bucket, ShardSegment, end_to_end

Term = Callable[[Tensor, bool], object]
"""Function that adds one gradient in place to (accumulator, whether to overwrite it)."""


class Gradients:
    """Gradients of one bucket.

    Args:
        keep_whole: whether full gradients persist (ZeRO-0 and 1) or are freed after their reduction.
        group: the group that reduces the full gradients.

    Attributes:
        whole: flat gradients summed over this rank's micro-batches; None while not allocated.
        shard: this rank's part of the sum over all ranks; a view of ``whole`` if that persists.
        update: gradients that the optimizer reads: ``shard``, or its copy in host memory.
        views: each slot's part of ``whole``.
        terms: gradient terms per backward and slot: one, or two if a weight is used twice.
        pending_backward: terms that the current backward has not produced yet.
        pending_accumulation: terms of the current backward that have not been added yet.
        filled: slots of ``whole`` that hold accumulated gradients.
        unreduced: whether ``shard`` holds no gradient yet.
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
        self._version = -1  # version of ``update`` to which the norms belong
        self.expect({})

    def expect(self, given: Mapping[Tensor, int]) -> None:
        """Set how many gradient terms each backward gives these parameters; the default is one."""
        self.terms = sum(given.get(slot.parameter, 1) for slot in self.bucket.slots)
        self.pending_backward = self.pending_accumulation = self.terms

    def begin(self) -> None:
        """Reset for a new step."""
        self.filled, self.unreduced = set(), True
        for slot in self.bucket.slots:
            slot.parameter.grad = None

    def add(self, slot: int, term: Term, together: int = 1) -> list[Tensor]:
        """Add a gradient term of one parameter, or of ``together`` consecutive matrices; return the updated sums."""
        self.make_room()
        views = self.views[slot : slot + together]
        term(end_to_end(views), slot not in self.filled)
        self.filled.update(range(slot, slot + together))
        self.pending_accumulation -= together
        return views

    def make_room(self) -> Tensor:
        """Return the buffer of full gradients, allocating it if necessary."""
        if self.whole is not None:
            return self.whole
        whole = torch.empty(self.bucket.full.numel(), dtype=self.shard.dtype, device=self.shard.device)
        whole[self.bucket.numel :].zero_()
        self._view(whole)
        return whole

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (full gradients, destination) for a reduction, with zeros where no gradient exists.

        The destination is `shard`, or a temporary to add to it if `shard` already holds a sum.
        """
        whole, shard = self.make_room(), self.shard
        for i, view in enumerate(self.views):
            if i not in self.filled:  # still holds uninitialised memory or the previous step
                view.zero_()
        if not self.keep_whole:
            self.whole, self.views, self.filled = None, [], set()
            if not self.unreduced:
                shard = torch.empty_like(shard)
        self.unreduced = False
        return whole, shard

    def on_reduced(self) -> None:
        """Compute norms after a reduction, while ``shard`` is in the caches and other buckets are in flight."""
        self._squares = {run: _square(self.shard[run.slice]) for run in self.bucket.runs if not run.sum_over}

    def finalise(self) -> None:
        """Complete ``update``, including sums for which no norm was computed."""
        if self.update is not self.shard:
            self.update.copy_(self.shard)
        self._version = self.update._version

    def square(self, run: ShardSegment) -> Tensor:
        """Return the squared norm of a part of ``update``, float64; cached unless it changed."""
        taken = self._squares.get(run) if self.update._version == self._version else None
        return _square(self.update[run.slice]) if taken is None else taken

    def _view(self, whole: Tensor) -> None:
        self.whole = whole
        self.views = [whole[slot.start : slot.stop].view(slot.split.local) for slot in self.bucket.slots]


def _square(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
