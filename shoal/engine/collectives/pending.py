"""What every transport offers, whatever moves the bytes: collectives and messages that are started and waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Until its result can be used."""


@dataclass
class Then:
    """A collective on its way, and what is done after it."""

    work: Pending
    finish: Callable[[], object]

    def wait(self) -> None:
        """Until both are done."""
        self.work.wait()
        self.finish()


class Transfer(Pending, Protocol):
    """A message on its way."""

    def is_completed(self) -> bool:
        """Whether it is known to have gone."""


class Transport(Protocol):
    """Moves what the ranks of one group exchange, without the backend.

    Attributes:
        ranks: their global ranks, in order.
    """

    ranks: list[int]

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start reducing contiguous ``x`` in place over the group."""

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """Start gathering flat ``part`` from every rank into flat ``out``."""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        """Start summing flat ``whole`` over the ranks into each rank's flat ``part``."""

    def send(self, x: Tensor, to: int) -> Transfer:
        """Start sending contiguous ``x`` to a member, by its place in the group."""

    def receive(self, x: Tensor, source: int) -> Transfer:
        """Start receiving contiguous ``x`` from a member, by its place in the group."""
