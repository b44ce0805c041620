"""Gradient buffers of a bucket, and the progress of a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from shoal.engine.collectives.group import allocate
from shoal.engine.parallel.zero.bucket import Bucket, ShardSegment, join_adjacent
from shoal.engine.streams import Mark, host_zeros

Term = Callable[[Tensor, bool], object]
"""Function that adds one gradient in place to (accumulator, whether to overwrite it)."""


class Gradients:
    """Gradients of one bucket.

    Args:
        keep_full: whether full gradients persist (ZeRO-0 and 1) or are freed after their reduction.

    Attributes:
        full: flat gradients summed over this rank's micro-batches; None while not allocated.
        shard: this rank's part of the sum over all ranks; a view of ``full`` if that persists.
        update: gradients that the optimizer reads: ``shard``, or its copy in host memory.
        views: each slot's part of ``full``.
        terms: gradient terms per backward and slot: one, or two if a weight is used twice.
        pending_backward: terms that the current backward has not produced yet.
        pending_accumulation: terms of the current backward that have not been added yet.
        filled: slots of ``full`` that hold accumulated gradients.
        unreduced: whether ``shard`` holds no gradient yet.
    """

    def __init__(self, bucket: Bucket, *, keep_full: bool):
        self.bucket, self.keep_full = bucket, keep_full
        dtype, device, groups = bucket.policy.reduce, bucket.full.device, bucket.groups
        self.full: Tensor | None = None
        self.views: list[Tensor] = []
        if keep_full:
            group = groups.shard_group or groups.replicate_group
            self.shard = bucket.mine(self._use(allocate(bucket.full.numel(), dtype, device, group)))
        else:
            self.shard = torch.zeros(bucket.chunk, dtype=dtype, device=device)
        self.update = host_zeros(bucket.chunk, dtype, device) if bucket.offloaded else self.shard
        self._fetched: Mark | None = None  # of the copy of ``shard`` to host memory in flight
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
        self.filled, self.unreduced, self._fetched = set(), True, None
        for slot in self.bucket.slots:
            slot.parameter.grad = None

    def add(self, slot: int, term: Term, together: int = 1) -> list[Tensor]:
        """Add a gradient term of one parameter, or of ``together`` consecutive matrices; return the updated sums."""
        self.allocate_full()
        views = self.views[slot : slot + together]
        term(join_adjacent(views), slot not in self.filled)
        self.filled.update(range(slot, slot + together))
        self.pending_accumulation -= together
        return views

    def allocate_full(self) -> Tensor:
        """Return the buffer of full gradients, allocating it if necessary."""
        if self.full is not None:
            return self.full
        full = torch.empty(self.bucket.full.numel(), dtype=self.shard.dtype, device=self.shard.device)
        full[self.bucket.numel :].zero_()
        return self._use(full)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (full gradients, destination) for a reduction, with zeros where no gradient exists.

        The destination is `shard`, or a temporary to add to it if `shard` already holds a sum.
        """
        full, shard = self.allocate_full(), self.shard
        for i, view in enumerate(self.views):
            if i not in self.filled:  # still holds uninitialised memory or the previous step
                view.zero_()
        if not self.keep_full:
            self.full, self.views, self.filled = None, [], set()
            if not self.unreduced:
                shard = torch.empty_like(shard)
        self.unreduced = False
        return full, shard

    def on_reduced(self) -> None:
        """Compute norms after a reduction, while ``shard`` is in the caches and other buckets are in flight.

        Offloaded gradients start on their way to the host, unless they are partial sums.
        """
        self._squares = {
            segment: _square(self.shard[segment.slice]) for segment in self.bucket.segments if not segment.sum_over
        }
        if len(self._squares) == len(self.bucket.segments):
            self._fetch()

    def _fetch(self) -> None:
        if self.update is not self.shard:
            copy = partial(self.update.copy_, self.shard, non_blocking=True)
            self._fetched = self.bucket.streams.to_host.run(copy)

    def finalise(self) -> None:
        """Complete ``update``, including sums for which no norm was computed; it may still be on its way."""
        if self._fetched is None:
            self._fetch()

    def arrive(self) -> None:
        """Wait until ``update`` is complete; if offloaded, on the host, and until the host may change the weights."""
        if self._fetched is not None:
            self._fetched.synchronize()
            self.bucket.release_host()
            self._fetched = None
        self._version = self.update._version

    def square(self, segment: ShardSegment) -> Tensor:
        """Return the squared norm of a part of ``update``, float64; cached unless it changed."""
        cached = self._squares.get(segment) if self.update._version == self._version else None
        return _square(self.update[segment.slice]) if cached is None else cached

    def _use(self, full: Tensor) -> Tensor:
        self.full, self.views = full, [slot.view(full) for slot in self.bucket.slots]
        return full


def _square(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
