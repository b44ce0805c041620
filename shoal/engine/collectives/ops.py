"""Collectives on tensors, and their autograd pairs for tensor and sequence parallelism.

Each pair is a function and its conjugate (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2):

    forward                              backward
    `copy_to`         identity           all-reduce
    `reduce_from`     all-reduce         identity
    `gather_from`     all-gather         reduce-scatter
    `scatter_to`      reduce-scatter     all-gather
    `all_to_all_dims` all-to-all         reverse all-to-all

A group of None has one rank, and every function is then the identity. CPU ranks of one host communicate through
shared memory (`shoal.engine.collectives.shm.transport`), other ranks through the group's backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.pending import Pending, Then
from shoal.engine.collectives.shm.transport import REDUCTIONS
from shoal.engine.streams import copy_later

# Renamed in torch 2.13; each name exists in one release or the other.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_EXCHANGED = 2 * 2**20  # bytes; up to this size two gloo ranks exchange tensors and sum locally


def all_reduce(x: Tensor, group: Group | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce contiguous ``x`` in place over the group; all ranks get bitwise equal results."""
    if group is not None:
        start_all_reduce(x, group, op).wait()
    return x


def sum_together(tensors: Sequence[Tensor], group: Group | None) -> None:
    """Sum each of some tensors in place over the group, in one message."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        all_reduce(tensors[0], group)
    elif tensors:
        total = all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
        for tensor, summed in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view(tensor.shape))


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Start reducing contiguous ``x`` in place over the group.

    With gloo, two ranks sum by exchanging their tensors: one round instead of the two of gloo's ring, up to three times
    faster (2 MiB: 1.2 against 3.6 ms). Large tensors take equally long either way and use gloo, whose threads add in
    the background. The sum of two numbers is bitwise the same in either order.
    """
    group.count("all-reduce", x, 2 * (group.size() - 1) / group.size())
    return group.throttled(_start_reduction(x, group, op))


def _start_reduction(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType) -> Pending:
    if group.shared is not None:
        if op not in REDUCTIONS:  # the backend would block shared-memory operations in flight
            raise ValueError(f"ranks that share memory reduce by sum, max or min, not by {op}")
        return group.shared.all_reduce(x, op)
    summed = op == dist.ReduceOp.SUM
    if summed and x.device.type == "cpu" and group.size() == 2 and x.nbytes <= _EXCHANGED:
        received, sizes = torch.empty_like(x), [0, 0]
        sizes[1 - group.rank()] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), sizes, sizes, group=group.backend, async_op=True)
        return Then(work, lambda: x.add_(received))
    return dist.all_reduce(x, op, group=group.backend, async_op=True)


def to_host(x: Tensor) -> Any:
    """Return the values of a collective's result, as `Tensor.tolist` does.

    On devices that queue collectives the host waits here for the other ranks, so stack traces show this function
    (`shoal.launch.watch.watchdog`).
    """
    return x.tolist()


def start_to_host(x: Tensor) -> Callable[[], Any]:
    """Start copying a collective's result to the host; the returned function waits for it, as `to_host`.

    The wait is for the copy alone, not for work that was queued later.
    """
    copy, copied = copy_later(x)

    def wait() -> Any:
        copied.synchronize()
        return to_host(copy)

    return wait


def all_gather(x: Tensor, group: Group | None, dim: int = 0) -> Tensor:
    """Concatenate the ranks' equal-shaped tensors along ``dim``, in rank order."""
    if group is None:
        return x
    n, in_place = group.size(), _outermost(x, dim)
    shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]) if in_place else (n, *x.shape)
    out = x.new_empty(shape)
    all_gather_flat(out.view(-1), x.contiguous().view(-1), group).wait()
    return out if in_place else torch.cat(out.unbind(0), dim)


def reduce_scatter(x: Tensor, group: Group | None, dim: int = 0) -> Tensor:
    """Sum over the ranks and keep this rank's part along ``dim``, which must be a multiple of the group's size."""
    if group is None:
        return x
    out, work = start_reduce_scatter(x, group, dim)
    work.wait()
    return out


def start_reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> tuple[Tensor, Pending]:
    """Start a `reduce_scatter`; return (output, pending collective)."""
    n = group.size()
    parts = x if _outermost(x, dim) else torch.stack(x.chunk(n, dim))
    out = x.new_empty(*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    return out, reduce_scatter_flat(out.view(-1), parts.contiguous().view(-1), group)


def _outermost(x: Tensor, dim: int) -> bool:
    """Return whether the parts along a dimension are contiguous in memory, as for a single sequence."""
    return all(n == 1 for n in x.shape[:dim])


def all_gather_flat(out: Tensor, part: Tensor, group: Group) -> Pending:
    """Start gathering flat ``part`` from every rank into flat ``out`` (``part`` may be this rank's slice of it)."""
    group.count("all-gather", part, group.size() - 1)
    if group.shared is not None:
        work = group.shared.all_gather(out, part)
    else:
        work = all_gather_single(out, part, group=group.backend, async_op=True)
    return group.throttled(work)


def reduce_scatter_flat(part: Tensor, full: Tensor, group: Group) -> Pending:
    """Start summing flat ``full`` over the ranks into each rank's flat ``part``, which may be its slice of ``full``.

    With gloo this is an exchange and a local sum: gloo's own reduce-scatter moves the bytes of an all-reduce, and its
    memory grows with each concurrent call.
    """
    group.count("reduce-scatter", part, group.size() - 1)
    return group.throttled(_start_parts(part, full, group))


def _start_parts(part: Tensor, full: Tensor, group: Group) -> Pending:
    if group.shared is not None:
        return group.shared.reduce_scatter(part, full)
    if full.device.type == "cpu":
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=group.backend, async_op=True)
        return Then(work, lambda: torch.sum(received.view(group.size(), -1), 0, out=part))  # always in rank order
    return reduce_scatter_single(part, full, group=group.backend, async_op=True)


def start_send(x: Tensor, to: int, group: Group) -> Pending:
    """Start sending contiguous ``x`` to the global rank ``to``; do not modify it before completion."""
    group.count("send", x, 1)
    if group.shared is not None:
        return group.shared.send(x, group.shared.ranks.index(to))
    return _started(dist.isend(x, to, group=group.backend))


def start_receive(x: Tensor, source: int, group: Group) -> Pending:
    """Start receiving contiguous ``x`` from the global rank ``source``, in the order of its sends."""
    if group.shared is not None:
        return group.shared.receive(x, group.shared.ranks.index(source))
    return _started(dist.irecv(x, source, group=group.backend))


def _started(work: dist.Work | None) -> dist.Work:
    """Check the handle of a torch message, which is None in processes outside the group."""
    assert work is not None
    return work


@dataclass
class _Several:
    """Several messages in flight."""

    works: Sequence[Pending]
    kept: tuple[Tensor, ...]  # tensors that must not change before completion

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def start_shift(x: Tensor, to: int, out: Tensor, source: int, group: Group) -> Pending:
    """Start sending contiguous ``x`` to the global rank ``to`` while receiving contiguous ``out`` from ``source``.

    Both start together, because NCCL can deadlock if two peers send first.
    """
    group.count("send", x, 1)
    if group.shared is not None:
        ranks = group.shared.ranks
        works: Sequence[Pending] = (
            group.shared.send(x, ranks.index(to)), group.shared.receive(out, ranks.index(source))
        )
    else:
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, to, group.backend), dist.P2POp(dist.irecv, out, source, group.backend)
        ])
    return group.throttled(_Several(works, (x, out)))


def all_to_all(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group | None) -> list[Tensor]:
    """Send part i to rank i, and receive this rank's part from every rank, in rank order.

    Args:
        parts: one tensor per rank, of one dtype and any shapes.
        shapes: shapes of the tensors to receive, per rank.
    """
    if group is None:
        return list(parts)
    mine = group.rank()
    if group.shared is not None:
        parts = [part.contiguous() for part in parts]
        out = [parts[mine] if rank == mine else parts[mine].new_empty(shape) for rank, shape in enumerate(shapes)]
        _exchange_parts(parts, out, group).wait()
        return out
    sent = torch.cat([part.flatten() for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    received, work = start_all_to_all_rows(sent, [part.numel() for part in parts], sizes, group)
    work.wait()
    return [part.view(tuple(shape)) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def _exchange_parts(parts: Sequence[Tensor], out: Sequence[Tensor], group: Group) -> Pending:
    """Start sending contiguous part i to every other rank i, and receiving ``out[i]``, over shared memory."""
    assert group.shared is not None
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for rank in others:
        group.count("all-to-all", parts[rank], 1)
    works: list[Pending] = [group.shared.send(parts[rank], rank) for rank in others]
    works += [group.shared.receive(out[rank], rank) for rank in others]
    return group.throttled(_Several(works, tuple(parts)))


def start_all_to_all_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
) -> tuple[Tensor, Pending]:
    """Start sending the next ``send[i]`` rows of ``x`` to rank i and receiving ``receive[i]`` rows from it.

    Returns:
        (received rows, pending collective), without a copy of the rows that are sent.
    """
    mine, x = group.rank(), x.contiguous()
    parts, out = x.split(list(send)), x.new_empty(sum(receive), *x.shape[1:])
    if group.shared is not None:
        places = out.split(list(receive))
        places[mine].copy_(parts[mine])
        return out, _exchange_parts(parts, places, group)
    for rank, part in enumerate(parts):
        if rank != mine:
            group.count("all-to-all", part, 1)
    work = dist.all_to_all_single(out, x, list(receive), list(send), group=group.backend, async_op=True)
    return out, group.throttled(_Several([work], (x,)))


# ---- autograd pairs --------------------------------------------------------------------------------------------

Pass = Callable[..., Tensor]
"""Function of a tensor, a group and other arguments."""

Meanwhile = Callable[[], object]
"""Callback that backward runs during the collective of an entry."""


def _nothing() -> None: ...


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group, function: Pass, conjugate: Pass, *args: Any) -> Tensor:
        ctx.conjugate, ctx.args = conjugate, (group, *args)
        return function(x, group, *args)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.conjugate(gradient, *ctx.args), *[None] * (2 + len(ctx.args))


def with_conjugate(x: Tensor, group: Group | None, function: Pass, conjugate: Pass, *args: Any) -> Tensor:
    """Apply a function to (x, group, *args); backward applies another one to the gradient."""
    return x if group is None else _Conjugate.apply(x, group, function, conjugate, *args)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def copy_to(x: Tensor, group: Group | None, meanwhile: Meanwhile = _nothing) -> Tensor:
    """Enter a region whose ranks each use all of ``x``; backward sums their gradients."""

    def total(gradient: Tensor, group: Group) -> Tensor:
        # The gradient can be reduced in place: it comes from matrix products, and only this node reads it.
        gradient = gradient.contiguous()
        work = start_all_reduce(gradient, group)
        meanwhile()
        work.wait()
        return gradient

    return with_conjugate(x, group, lambda x, group: x.view_as(x), total)


def reduce_from(x: Tensor, group: Group | None) -> Tensor:
    """Leave a region of partial sums by summing them, in place in ``x``, the fresh output of a matrix product."""
    return x if group is None else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: Group | None, dim: int, meanwhile: Meanwhile = _nothing) -> Tensor:
    """Enter a region that needs all of ``x``, which the ranks hold split along ``dim``."""

    def own_part(gradient: Tensor, group: Group) -> Tensor:
        out, work = start_reduce_scatter(gradient, group, dim)
        meanwhile()
        work.wait()
        return out

    return with_conjugate(x, group, lambda x, group: all_gather(x, group, dim), own_part)


def scatter_to(x: Tensor, group: Group | None, dim: int) -> Tensor:
    """Leave a region of partial sums, keeping this rank's part along ``dim`` of the total."""
    return with_conjugate(x, group, reduce_scatter, all_gather, dim)


def all_to_all_dims(
    x: Tensor, group: Group | None, split: int, join: int, parts: Sequence[int], pieces: Sequence[int]
) -> Tensor:
    """Exchange all of dim ``split`` and a piece of dim ``join`` for a part of ``split`` and all of ``join``.

    Args:
        parts: length of each rank's part of ``split``.
        pieces: length of each rank's piece of ``join``.
    """
    return with_conjugate(
        x, group, lambda x, group: _exchange(x, group, split, join, parts, pieces),
        lambda gradient, group: _exchange(gradient, group, join, split, pieces, parts),
    )


def _exchange(x: Tensor, group: Group, split: int, join: int, parts: Sequence[int], pieces: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[split] = parts[group.rank()]
    shapes = [[*shape[:join], length, *shape[join + 1 :]] for length in pieces]
    return torch.cat(all_to_all(x.split(tuple(parts), split), shapes, group), join)
