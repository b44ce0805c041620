"""Groups whose ranks are not there: what one rank of a world of any size calls, without the others."""

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
    """A collective that is over as soon as it is started.

    Args:
        buffer: what it uses beside its arguments; alive as long as this is.
    """

    def __init__(self, buffer: Tensor | None = None):
        self.buffer = buffer

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True


class Nowhere:
    """A transport that moves nothing: what would be received is whatever lies in the memory for it.

    Only what has numbers, and is gathered, is taken to be alike on all ranks: how many rows each has for every expert.

    Attributes:
        ranks: global ranks of the group.
        by_gloo: sums receive into a buffer of their own, as they do over gloo (`shoal.engine.collectives.ops`); NCCL
            needs none of the caller's.
    """

    def __init__(self, ranks: Sequence[int], *, by_gloo: bool = False):
        self.ranks, self.by_gloo = list(ranks), by_gloo

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Done:
        """See `shoal.engine.collectives.shm.transport.SharedGroup`, as for the others."""
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
    """A group of which this process is the only member that is there."""

    is_dry_run = True

    def __init__(self, ranks: Sequence[int], rank: int, *, by_gloo: bool = False):
        super().__init__(None, Nowhere(ranks, by_gloo=by_gloo))
        self._ranks, self._rank = list(ranks), list(ranks).index(rank)

    @property
    def ranks(self) -> list[int]:
        """Their global ranks, in order."""
        return self._ranks

    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def rank(self) -> int:
        """This process's place among them."""
        return self._rank


class DryMesh(Mesh):
    """The mesh of one rank alone, in any world; nothing is communicated, everything is counted.

    Args:
        by_gloo: as of `Nowhere`.

    >>> mesh = DryMesh(Layout(dp=12500, tp=8), rank=77)
    >>> mesh.group("dp").size(), mesh.group("tp").rank()
    (12500, 5)
    """

    def __init__(self, layout: Layout, rank: int, *, by_gloo: bool = False):
        super().__init__(layout, rank, torch.device("cpu"), transport="dry")
        self.by_gloo = by_gloo

    def group(self, axis: str, purpose: str = "") -> Group | None:
        """The group along ``axis``, or None if it has one rank."""
        ranks = tuple(self.ranks(axis))
        if len(ranks) == 1:
            return None
        key = (axis, purpose, ranks)
        if key not in self._named:
            self._named[key] = DryGroup(ranks, self.rank, by_gloo=self.by_gloo)
        return self._named[key]

    def real_index_tensors(self) -> AbstractContextManager[object]:
        """In it are made real tensors, not fake ones."""
        return unset_fake_temporarily()
