"""Collectives on plain tensors, and the autograd pairs that tensor and sequence parallelism are made of.

Each pair is a function and its conjugate (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2):

    forward                              backward
    `copy_to`         identity           all-reduce
    `reduce_from`     all-reduce         identity
    `gather_from`     all-gather         reduce-scatter
    `scatter_to`      reduce-scatter     all-gather

A group of None has one rank, and every function here is then the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None

# torch 2.13 renamed these two; both names exist in one release or the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Until its result can be used."""


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce contiguous ``x`` in place over the group; every rank gets the same bits."""
    if group is None:
        return x
    if op == dist.ReduceOp.SUM:
        start_all_reduce(x, group).wait()
    else:
        dist.all_reduce(x, op, group=group)
    return x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start summing contiguous ``x`` in place over the group.

    Two CPU ranks exchange all they have and add: one round, where gloo's ring takes two and was measured up to three
    times slower (2 MiB: 1.2 against 3.6 ms). The sum of two numbers has the same bits in either order.
    """
    if x.device.type == "cpu" and group.size() == 2:
        received, sizes = torch.empty_like(x), [0, 0]
        sizes[1 - group.rank()] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), sizes, sizes, group=group, async_op=True)
        return _Added(work, received, x)
    return dist.all_reduce(x, group=group, async_op=True)


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate the ranks' equal-shaped tensors along ``dim``, in rank order."""
    if group is None:
        return x
    n = group.size()
    out = x.new_empty(n * x.shape[0], *x.shape[1:]) if dim == 0 else x.new_empty(n, *x.shape)
    _all_gather(out.view(-1), x.contiguous().view(-1), group=group)
    return out if dim == 0 else torch.cat(out.unbind(0), dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum over the ranks and keep this rank's part along ``dim``, which must be a multiple of the group's size."""
    if group is None:
        return x
    n = group.size()
    parts = x if dim == 0 else torch.stack(x.chunk(n, dim))
    out = x.new_empty(*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    reduce_scatter_flat(out.view(-1), parts.contiguous().view(-1), group).wait()
    return out


@dataclass
class _Exchanged:
    """The parts of a sum on their way to the rank that adds them, always in rank order."""

    work: dist.Work
    received: Tensor  # [n, part]
    part: Tensor

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, 0, out=self.part)


@dataclass
class _Added:
    """The other rank's numbers on their way to be added to this rank's."""

    work: dist.Work
    received: Tensor
    own: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.own.add_(self.received)


def all_gather_flat(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start gathering flat ``part`` from every rank into flat ``out`` (``part`` may be this rank's slice of it)."""
    return _all_gather(out, part, group=group, async_op=True)


def reduce_scatter_flat(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start summing flat ``whole`` over the ranks into each rank's flat ``part``, which may be its slice of ``whole``.

    On the CPU by an exchange and a local sum: gloo's own reduce-scatter moves an all-reduce's bytes, and its memory
    grew with every call while several were on their way.
    """
    if whole.device.type == "cpu":
        received = torch.empty_like(whole)
        work = dist.all_to_all_single(received, whole, group=group, async_op=True)
        return _Exchanged(work, received.view(group.size(), -1), part)
    return _reduce_scatter(part, whole, group=group, async_op=True)


# ---- autograd pairs --------------------------------------------------------------------------------------------


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        # A fresh buffer is not needed: the gradient comes from matrix products that only this node reads.
        return all_reduce(gradient.contiguous(), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return all_gather(gradient, ctx.group, ctx.dim), None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Enter a region whose ranks each use all of ``x``: their gradients of it add up."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Leave a region whose ranks each hold a partial sum. Writes into ``x``, the fresh output of a matrix product."""
    return x if group is None else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: Group, dim: int) -> Tensor:
    """Enter a region with all parts of ``x``, which the ranks hold split along ``dim``."""
    return x if group is None else _GatherFrom.apply(x, group, dim)


def scatter_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Leave a region of partial sums, keeping this rank's part along ``dim`` of the total."""
    return x if group is None else _ScatterTo.apply(x, group, dim)
