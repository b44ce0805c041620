"""Asynchronous collectives and messages, transports of a group, and that of dry runs, which moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Pending(Protocol):
    """A collective or a message in flight."""

    def wait(self) -> object:
        """Wait until the result is available."""

    def is_completed(self) -> bool:
        """Return whether it is known to be complete."""


class Transport(Protocol):
    """What moves a group's tensors instead of its backend; `shoal.engine.collectives.shm.transport` explains each."""

    ranks: list[int]

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending: ...

    def all_gather(self, out: Tensor, part: Tensor) -> Pending: ...

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Pending: ...

    def send(self, x: Tensor, to: int) -> Pending: ...

    def receive(self, x: Tensor, source: int) -> Pending: ...


@dataclass
class Then:
    """A collective or a message in flight followed by a callback."""

    work: Pending
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@dataclass
class Done:
    """A completed collective, with the tensors that it would need until then."""

    kept: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class DryTransport:
    """Transport that moves nothing; receive buffers keep their contents.

    Gathered index tensors are assumed equal on all ranks: the number of rows per expert.

    Attributes:
        by_gloo: whether sums receive into a separate buffer, as over gloo (`shoal.engine.collectives.ops`); NCCL needs
            no buffer of the caller.
    """

    def __init__(self, ranks: Sequence[int], *, by_gloo: bool = False):
        self.ranks, self.by_gloo = list(ranks), by_gloo

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Done:
        exchanged = self.by_gloo and len(self.ranks) == 2 and op == dist.ReduceOp.SUM
        return Done((torch.empty_like(x),) if exchanged else ())

    def all_gather(self, out: Tensor, part: Tensor) -> Done:
        if not isinstance(out, FakeTensor) or (out.is_cuda and not out.is_floating_point()):
            out.view(len(self.ranks), -1).copy_(part.clone())
        return Done()

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Done:
        return Done((full, torch.empty_like(full)) if self.by_gloo else (full,))

    def send(self, x: Tensor, to: int) -> Done:
        return Done()

    def receive(self, x: Tensor, source: int) -> Done:
        return Done()
