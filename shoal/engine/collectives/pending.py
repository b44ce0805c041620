"""Interfaces of asynchronous collectives, messages and transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Wait until the result is available."""


@dataclass
class Then:
    """A collective in flight followed by a callback."""

    work: Pending
    finish: Callable[[], object]

    def wait(self) -> None:
        """Wait for the collective and run the callback."""
        self.work.wait()
        self.finish()


class Transfer(Pending, Protocol):
    """A message in flight."""

    def is_completed(self) -> bool:
        """Return whether the message is known to be complete."""


class Transport(Protocol):
    """Communication among the ranks of one group that bypasses the backend.

    Attributes:
        ranks: global ranks of the group, in order.
    """

    ranks: list[int]

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start reducing contiguous ``x`` in place over the group."""

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """Start gathering flat ``part`` from every rank into flat ``out``."""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        """Start summing flat ``whole`` over the ranks into each rank's flat ``part``."""

    def send(self, x: Tensor, to: int) -> Transfer:
        """Start sending contiguous ``x`` to a member, by its index in the group."""

    def receive(self, x: Tensor, source: int) -> Transfer:
        """Start receiving contiguous ``x`` from a member, by its index in the group."""
