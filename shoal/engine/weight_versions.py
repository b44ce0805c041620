"""Weight stashing: versions of a stage's weights that in-flight micro-batches still use.

PipeDream (Narayanan et al. 2019, section 3.3) keeps a version per in-flight micro-batch, PipeDream-2BW (Narayanan et
al. 2021b) keeps two. The optimizer updates the newest version in place. A version that is used again is copied before
the update, and passes that use it redirect the stage's parameters to the copy. With ZeRO-3 a version is this rank's
shard and is gathered for each use.

Autograd keeps a parameter itself for backward, but of its transpose, as in ``F.linear``, the memory. Where a module's
operators do so, a version is copied before its first use, and forward and backward compute with the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from shoal.engine.parallel.zero.bucket import Bucket
from shoal.pipeline.program import COMPUTE, Action, Op


class WeightVersions:
    """Weight versions of one stage on one rank.

    Args:
        actions: the stage's actions, each with its index in the rank's program; they determine the lifetime of a
            version.
        early: whether a version is copied before its first use.

    Attributes:
        copies: versions besides the newest, one tensor per bucket.
        newest: the number of the version that the optimizer updates.
    """

    def __init__(self, buckets: Sequence[Bucket], actions: Sequence[tuple[int, Action]], *, early: bool = False):
        self.buckets = buckets
        self.early = early and any(bucket.keep_full for bucket in buckets)
        self.steps = [i for i, action in actions if action.op is Op.STEP]
        self.last_use = {action.version: i for i, action in actions if action.op in COMPUTE}
        self.copies: dict[int, list[Tensor]] = {}
        self._free: list[list[Tensor]] = []
        self.newest = 0

    def begin(self) -> None:
        """Start a program whose version 0 is the current weights."""
        self._use(self.newest)
        self.newest = 0

    def before(self, i: int, action: Action) -> None:
        """Load the version that action number ``i`` computes with or updates."""
        if action.op in COMPUTE:
            following = next((step for step in self.steps if step > i), inf)
            if self.early and action.version == self.newest and self._outlives(following):
                self._copy_newest()
            self._use(action.version)
        elif action.op is Op.STEP:
            self._swap(None)
            if self._outlives(i):
                self._copy_newest()
            self.newest = action.version

    def after(self, i: int, action: Action) -> None:
        """Free a version after its last use."""
        if action.op in COMPUTE and self.last_use[action.version] == i and action.version in self.copies:
            self._use(self.newest)
            self._free.append(self.copies.pop(action.version))

    def bytes(self) -> int:
        """Return the bytes of versions besides the newest, and of memory reserved for them."""
        return sum(t.untyped_storage().nbytes() for copy in (*self.copies.values(), *self._free) for t in copy)

    def _outlives(self, step: float) -> bool:
        """Return whether the newest version, without a copy yet, is used after a STEP."""
        return self.newest not in self.copies and self.last_use.get(self.newest, -1) > step

    def _use(self, version: int) -> None:
        self._swap(self.copies.get(version))

    def _swap(self, copies: Sequence[Tensor] | None) -> None:
        for i, bucket in enumerate(self.buckets):
            bucket.swap_weights(copies[i] if copies else None)

    def _copy_newest(self) -> None:
        copies = self._free.pop() if self._free else [torch.empty_like(bucket.resident) for bucket in self.buckets]
        for bucket, copy in zip(self.buckets, copies, strict=True):
            copy.copy_(bucket.resident)
        self.copies[self.newest] = copies
