"""Collectives on parts and rows whose sizes differ between ranks, and their autograd pairs.

    forward                                  backward
    `take_shard`          own part           all-gather
    `all_gather_uneven`   all-gather         own part
    `exchange_rows`       all-to-all         reverse all-to-all (`ExchangedRows`: in flight)
    `gather_rows`         all-gather         reduce-scatter
    `scatter_rows`        reduce-scatter     all-gather
    `permute_rows`        permutation        inverse permutation

With a group of None, which has one rank, each is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_gather, all_to_all, start_all_to_all_rows, with_conjugate
from shoal.engine.collectives.pending import Pending


def part_lengths(n: int, ranks: int) -> list[int]:
    """Split ``n`` into part lengths, the last of which may be shorter or 0.

    >>> part_lengths(5, 4)
    [2, 2, 1, 0]
    """
    each = -(-n // ranks)
    return [max(0, min(each, n - rank * each)) for rank in range(ranks)]


def _own_part(x: Tensor, group: Group, dim: int, lengths: Sequence[int]) -> Tensor:
    rank = group.rank()
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).contiguous()


def _gather_parts(x: Tensor, group: Group, dim: int, lengths: Sequence[int]) -> Tensor:
    most = max(lengths)
    if x.shape[dim] < most:
        padding = list(x.shape)
        padding[dim] = most - x.shape[dim]
        x = torch.cat((x, x.new_zeros(padding)), dim)
    parts = all_gather(x.unsqueeze(0), group)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def take_shard(x: Tensor, group: Group | None, dim: int, lengths: Sequence[int]) -> Tensor:
    """Take this rank's part of a replicated tensor; backward gathers the full gradient on all ranks."""
    return with_conjugate(x, group, _own_part, _gather_parts, dim, lengths)


def all_gather_uneven(x: Tensor, group: Group | None, dim: int, lengths: Sequence[int]) -> Tensor:
    """Gather parts of these lengths along ``dim`` for a replicated computation; backward takes this rank's part."""
    return with_conjugate(x, group, _gather_parts, _own_part, dim, lengths)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None) -> Tensor:
    """Exchange rows all-to-all: the next ``send[i]`` rows go to rank i, and ``receive[i]`` rows come from it."""
    return ExchangedRows(x, send, receive, group).wait()


class ExchangedRows:
    """An `exchange_rows` in flight.

    Backward starts the reverse exchange at the place of the wait, and waits for it at the place of the start: the
    backward of operations in between runs meanwhile, because autograd prefers the operation that was called last.
    """

    def __init__(self, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None):
        self._exchange = None if group is None else _Exchange(group, send, receive)
        self._rows: Tensor | None = x if self._exchange is None else _StartExchange.apply(x, self._exchange)

    def wait(self) -> Tensor:
        """Return the rows, once; this object then no longer holds them."""
        rows, self._rows = self._rows, None
        assert rows is not None, "rows are returned once"
        return rows if self._exchange is None else _WaitForExchange.apply(rows, self._exchange)


@dataclass
class _Exchange:
    """An exchange of rows, and the rows in flight, forward or backward."""

    group: Group
    send: Sequence[int]
    receive: Sequence[int]
    flight: tuple[Tensor, Pending] | None = None

    def start(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self.flight = start_all_to_all_rows(x, send, receive, self.group)
        return self.flight[0]

    def finish(self) -> Tensor:
        assert self.flight is not None, "an exchange is started first"
        (rows, pending), self.flight = self.flight, None
        self.group.meanwhile()
        pending.wait()
        return rows


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x, exchange.send, exchange.receive)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.exchange.finish(), None


class _WaitForExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.exchange.start(gradient, ctx.exchange.receive, ctx.exchange.send)
        return gradient, None  # of the rows' shape, as autograd requires; `_StartExchange` returns what arrives


def gather_rows(x: Tensor, counts: Sequence[int], group: Group | None) -> Tensor:
    """Gather the rows of all ranks in rank order, ``counts[i]`` from rank i; backward sums their gradients."""
    return with_conjugate(x, group, _gather, _scatter, counts)


def scatter_rows(x: Tensor, counts: Sequence[int], group: Group | None) -> Tensor:
    """Sum the ranks' rows and keep this rank's ``counts[index]`` rows."""
    return with_conjugate(x, group, _scatter, _gather, counts)


def _gather(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    return torch.cat(all_to_all([x] * group.size(), [(n, *x.shape[1:]) for n in counts], group))


def _scatter(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    own = (counts[group.rank()], *x.shape[1:])
    return torch.stack(all_to_all(x.split(list(counts)), [own] * group.size(), group)).sum(0)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


permute_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = _PermuteRows.apply
"""Permute rows, given (x, order, inverse of order): row i of the result is row ``order[i]`` of x. Backward copies rows
instead of adding them.
"""
