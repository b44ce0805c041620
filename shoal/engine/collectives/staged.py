"""Staged transport: a device's tensors exchanged through host memory, so that several ranks can share one device.

NCCL refuses two ranks on one device. With this transport (``Mesh(transport="staged")``) the code of every parallelism
for the device runs on a single one: an operation copies its tensor into page-locked host memory, ranks exchange it
there as CPU ranks do, and waiting copies the result back. It is for checking, not for speed: the host waits for the
device before each operation, and nothing overlaps.

The copies are in the order of the current stream. An operation reads its tensor when it starts, after all work queued
so far, and work queued after `wait` sees the result. So it keeps the contract of an asynchronous NCCL collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import (
    all_gather_flat,
    reduce_scatter_flat,
    start_all_reduce,
    start_receive,
    start_send,
)
from shoal.engine.collectives.pending import Then


def host_buffer(x: Tensor) -> Tensor:
    """Return uninitialised host memory for ``x``, page-locked if a CUDA device copies to and from it."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


def copy_to_host(x: Tensor) -> Tensor:
    """Return a copy in host memory, complete on return: the host waits for the current stream."""
    return host_buffer(x).copy_(x.detach())


def _copy_back(x: Tensor, host: Tensor) -> Callable[[], object]:
    return lambda: x.detach().copy_(host)


class StagedTransport:
    """Transport of tensors on any device through the host memory of a group.

    Args:
        host: the same ranks, as a group whose tensors are in host memory.
    """

    def __init__(self, host: Group):
        self.ranks, self._host = host.ranks, host

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Then:
        host = copy_to_host(x)
        return Then(start_all_reduce(host, self._host, op), _copy_back(x, host))

    def all_gather(self, out: Tensor, part: Tensor) -> Then:
        host = host_buffer(out)
        return Then(all_gather_flat(host, copy_to_host(part), self._host), _copy_back(out, host))

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Then:
        host = host_buffer(part)
        return Then(reduce_scatter_flat(host, copy_to_host(full), self._host), _copy_back(part, host))

    def send(self, x: Tensor, to: int) -> Then:
        host = copy_to_host(x)
        return Then(start_send(host, self.ranks[to], self._host), lambda: host)  # alive until the message is complete

    def receive(self, x: Tensor, source: int) -> Then:
        host = host_buffer(x)
        return Then(start_receive(host, self.ranks[source], self._host), _copy_back(x, host))
