"""Weight stashing: the versions of a stage's weights that micro-batches in flight still compute with.

PipeDream (Narayanan et al. 2019, section 3.3) keeps a version for each of them, PipeDream-2BW (Narayanan et al. 2021b)
two. The newest version lies where the optimizer updates it, in place. Before an update, a version that is used again is
copied; a pass that uses it has the stage's parameters point at the copy. Autograd keeps parameters, not their data, and
so finds in backward what the parameters point at then: the version that the forward used.

With ZeRO-3 a version is this rank's shard of it, and is gathered for each use as always.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.engine.parallel.zero.bucket import Bucket
from shoal.pipeline.program import COMPUTE, Action, Op


class Stash:
    """The versions of one stage's weights on one rank.

    Args:
        buckets: of the stage.
        actions: of the stage, each with its place in the rank's program: they say how long a version is needed.
    """

    def __init__(self, buckets: Sequence[Bucket], actions: Sequence[tuple[int, Action]]):
        self.buckets = buckets
        self.last_use = {action.version: i for i, action in actions if action.op in COMPUTE}
        self.kept: dict[int, list[Tensor]] = {}
        self._free: list[list[Tensor]] = []
        self.newest = 0

    def begin(self) -> None:
        """A program begins: the weights as they are now are its version 0."""
        self._use(self.newest)
        self.newest = 0

    def before(self, i: int, action: Action) -> None:
        """Have the weights ready for action number ``i``: those that a pass uses, or those that are updated."""
        if action.op in COMPUTE:
            self._use(action.version)
        elif action.op is Op.STEP:
            self._use(self.newest)
            if self.last_use.get(self.newest, -1) > i:
                self._keep()
            self.newest = action.version

    def after(self, i: int, action: Action) -> None:
        """A version is given back after its last use."""
        if action.op in COMPUTE and self.last_use[action.version] == i and action.version in self.kept:
            self._use(self.newest)
            self._free.append(self.kept.pop(action.version))

    def bytes(self) -> int:
        """Of the versions besides the newest: kept, or left from those that were."""
        return sum(t.untyped_storage().nbytes() for copies in (*self.kept.values(), *self._free) for t in copies)

    def _use(self, version: int) -> None:
        copies: Sequence[Tensor | None] = self.kept.get(version) or [None] * len(self.buckets)
        for bucket, copy in zip(self.buckets, copies, strict=True):
            bucket.use(copy)

    def _keep(self) -> None:
        copies = self._free.pop() if self._free else [torch.empty_like(bucket.held) for bucket in self.buckets]
        for bucket, copy in zip(self.buckets, copies, strict=True):
            copy.copy_(bucket.held)
        self.kept[self.newest] = copies
