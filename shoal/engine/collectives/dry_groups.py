"""Process groups for dry runs: one rank of a world of any size runs without the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.layout import Layout


class Done:
    """A collective that completes immediately.

    Args:
        buffer: temporary buffer of the collective, kept alive by this object.
    """

    def __init__(self, buffer: Tensor | None = None):
        self.buffer = buffer

    def wait(self) -> None:
        """Return immediately."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class Nowhere:
    """Transport that moves nothing; receive buffers keep their contents.

    Gathered index tensors are assumed equal on all ranks: the number of rows per expert.

    Attributes:
        ranks: global ranks of the group.
        by_gloo: whether sums receive into a separate buffer, as over gloo (`shoal.engine.collectives.ops`); NCCL needs
            no buffer of the caller.
    """

    def __init__(self, ranks: Sequence[int], *, by_gloo: bool = False):
        self.ranks, self.by_gloo = list(ranks), by_gloo

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Done:
        """See `shoal.engine.collectives.shm.transport.SharedGroup`; the same applies to the other methods."""
        exchanged = self.by_gloo and len(self.ranks) == 2 and op == dist.ReduceOp.SUM
        return Done(torch.empty_like(x) if exchanged else None)

    def all_gather(self, out: Tensor, part: Tensor) -> Done:
        if not isinstance(out, FakeTensor):
            out.view(len(self.ranks), -1).copy_(part.clone())
        return Done()

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Done:
        return Done(torch.empty_like(whole) if self.by_gloo else None)

    def send(self, x: Tensor, to: int) -> Done:
        return Done()

    def receive(self, x: Tensor, source: int) -> Done:
        return Done()


class DryGroup(Group):
    """Group in which only this process exists."""

    is_dry_run = True

    def __init__(self, ranks: Sequence[int], rank: int, *, by_gloo: bool = False):
        super().__init__(None, Nowhere(ranks, by_gloo=by_gloo))
        self._ranks, self._rank = list(ranks), list(ranks).index(rank)

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group, in order."""
        return self._ranks

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def rank(self) -> int:
        """Return this process's index in the group."""
        return self._rank


class DryMesh(Mesh):
    """Mesh of one rank in a world of any size; counts communication but performs none.

    Args:
        by_gloo: see `Nowhere`.

    >>> mesh = DryMesh(Layout(dp=12500, tp=8), rank=77)
    >>> mesh.group("dp").size(), mesh.group("tp").rank()
    (12500, 5)
    """

    def __init__(self, layout: Layout, rank: int, *, by_gloo: bool = False):
        super().__init__(layout, rank, torch.device("cpu"), transport="dry")
        self.by_gloo = by_gloo

    def group(self, axis: str, purpose: str = "") -> Group | None:
        """Return the group along ``axis``, or None if it has one rank."""
        ranks = tuple(self.ranks(axis))
        if len(ranks) == 1:
            return None
        key = (axis, purpose, ranks)
        if key not in self._named:
            self._named[key] = DryGroup(ranks, self.rank, by_gloo=self.by_gloo)
        return self._named[key]

    def real_index_tensors(self) -> AbstractContextManager[object]:
        """Return a context that creates real tensors instead of fake ones."""
        return unset_fake_temporarily()
