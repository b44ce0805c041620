"""Tensor-parallel collectives overlapped with the adjacent matrix product, as one or chunk by chunk.

With sequence parallelism the ranks form a ring (Wang et al. 2023, "Overlap communication with dependent computation via
decomposition in large deep learning models", section 4):

- *all-gather, then multiply*: a rank multiplies its part while the next arrives from its neighbour, and forwards it
  (`gather_products`);
- *multiply, then reduce-scatter*: a rank starts with the part that travels farthest, forwards the partial sum, and
  multiplies the next part meanwhile; its own part is last (`scatter_products`).

The forward of a region's entry and the backward of its exit gather; the other two scatter. The volume equals the
collective's. The feed-forward block is independent of token order, so its parts are stored one after the other, which
makes each one matrix even with several sequences. In backward the entry's input is all-gathered again.

Without sequence parallelism the products of the exit (in forward) and of the entry (in backward) are computed in
`CHUNKS` chunks of tokens, and each chunk is all-reduced while the next is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import (
    Pending,
    all_gather,
    all_gather_flat,
    reduce_scatter_flat,
    start_all_reduce,
    start_reduce_scatter,
    start_shift,
)
from shoal.engine.parallel.weight_grad import NO_COMM, Meanwhile, NoComm, sum_products

SEQUENCE = 1  # dim of [b, s, h] that sequence parallelism splits
CHUNKS = 2  # chunks per all-reduce: more hide more communication, but make smaller products


def multiply_into(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write x F into ``out``: [b, s, k], [k, n] -> [b, s, n]; both may be slices of longer sequences."""
    if x.is_contiguous() and out.is_contiguous():
        torch.mm(x.flatten(0, 1), factor, out=out.view(-1, out.shape[-1]))
    else:
        torch.bmm(x, factor.expand(len(x), *factor.shape), out=out)


def split_parts(x: Tensor, n: int, tokenwise: bool) -> Tensor | tuple[Tensor, ...]:
    """Return each rank's part [b, s/n, k] of [b, s, k], as views; ``tokenwise`` ones are stored one after the other."""
    return x.view(n, len(x), -1, x.shape[-1]) if tokenwise else x.chunk(n, SEQUENCE)


def pass_on(x: Tensor, group: Group, into: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Start sending contiguous ``x`` to the next rank of the ring; return (receive buffer, pending transfer)."""
    arriving = torch.empty_like(x) if into is None else into
    rank, ranks = group.rank(), group.ranks
    return arriving, start_shift(x, ranks[(rank + 1) % len(ranks)], arriving, ranks[rank - 1], group)


def gather_products(
    x: Tensor, factors: Sequence[Tensor], group: Group, tokenwise: bool
) -> tuple[Tensor, list[Tensor]]:
    """Gather all parts of x, and multiply each by every factor as it arrives.

    Args:
        x: [b, s/n, k], this rank's part.
        factors: [k, m_i].
        tokenwise: see `split_parts`; applies to the results.

    Returns:
        The gathered x [b, s, k], and one product [b, s, m_i] per factor.
    """
    n, rank = group.size(), group.rank()
    b, s, k = x.shape
    gathered = x.new_empty(b, n * s, k)
    results = [x.new_empty(b, n * s, factor.shape[1]) for factor in factors]
    places = split_parts(gathered, n, tokenwise)
    outs = [split_parts(result, n, tokenwise) for result in results]
    part = x.contiguous()
    places[rank].copy_(part)
    for hop in range(n):
        at, following = (rank - hop) % n, places[rank - hop - 1]
        if hop + 1 < n:
            arriving, exchange = pass_on(part, group, following if following.is_contiguous() else None)
        for factor, out in zip(factors, outs, strict=True):
            multiply_into(part, factor, out[at])
        if hop + 1 < n:
            exchange.wait()
            part = arriving
            if not following.is_contiguous():
                following.copy_(part)
    return gathered, results


def scatter_products(
    xs: Sequence[Tensor], factors: Sequence[Tensor], group: Group, tokenwise: bool,
    meanwhile: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return this rank's part of the sum over all ranks of sum_i x_i F_i.

    Args:
        xs: [b, s, k_i].
        factors: [k_i, m].
        tokenwise: see `split_parts`; applies to the xs.
        meanwhile: called during the last transfer.

    Returns:
        [b, s/n, m], summed in ring order ending at this rank.
    """
    n, rank = group.size(), group.rank()
    b, s, _ = xs[0].shape
    parts = [split_parts(x.contiguous() if tokenwise else x, n, tokenwise) for x in xs]
    sums: tuple[Tensor, Pending] | None = None  # partial sums in transit
    for hop in range(n):
        at = (rank - 1 - hop) % n
        mine = xs[0].new_empty(b, s // n, factors[0].shape[1])
        multiply_into(parts[0][at], factors[0], mine)
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            mine.baddbmm_(part[at], factor.expand(b, *factor.shape))
        if hop + 1 == n:
            meanwhile()
        if sums is not None:
            arriving, exchange = sums
            exchange.wait()
            mine += arriving
        if hop + 1 < n:
            sums = pass_on(mine, group)
    return mine


@dataclass(frozen=True)
class GatheredEntry(NoComm):
    """Entry of a region with sequence parallelism: all-gather, then multiply.

    In backward the gradient of the input is reduce-scattered while the weight gradients are computed.

    Attributes:
        again: keep the rank's part of the input, and gather it again while backward computes the gradient of the input
            (Korthikanti et al. 2022, section 4.2.2). Else all of it is kept.
        tokenwise: see `split_parts`; applies to the results.
    """

    group: Group
    again: bool = True
    tokenwise: bool = False

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        gathered, results = NO_COMM.forward(all_gather(x, self.group, SEQUENCE), weights, biases)
        return x if self.again else gathered, results

    def start_gather(self, kept: Tensor) -> Callable[[], Tensor]:
        if not self.again:
            return lambda: kept
        parts = kept.new_empty(self.group.size(), *kept.shape)
        work = all_gather_flat(parts.view(-1), kept.contiguous().view(-1), self.group)

        def wait() -> Tensor:
            work.wait()
            return parts.flatten(0, 1) if self.tokenwise or len(kept) == 1 else torch.cat(parts.unbind(0), SEQUENCE)

        return wait

    def sum(self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[], object]) -> Tensor:
        d_x = sum_products(gradients, factors)
        if self.tokenwise:  # in the order of the ranks
            part = d_x.new_empty(len(d_x), d_x.shape[1] // self.group.size(), d_x.shape[2])
            work = reduce_scatter_flat(part.view(-1), d_x.view(-1), self.group)
        else:
            part, work = start_reduce_scatter(d_x, self.group, SEQUENCE)
        del d_x
        meanwhile()
        work.wait()
        return part


@dataclass(frozen=True)
class RingEntry(GatheredEntry):
    """`GatheredEntry` whose forward is around the ring: each part is multiplied while the next arrives.

    Backward has both collectives, each of which a product hides. Around the ring, partial sums would wait for the
    gather, and both would have to be hidden by one product.
    """

    chunked = True
    gather = staticmethod(gather_products)

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        gathered, results = self.gather(x, [weight.t() for weight in weights], self.group, self.tokenwise)
        for y, bias in zip(results, biases, strict=True):
            if bias is not None:
                y += bias
        return x if self.again else gathered, results

    def sum(self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[], object]) -> Tensor:
        if self.again:
            return super().sum(gradients, factors, meanwhile)
        return scatter_products(gradients, factors, self.group, self.tokenwise, meanwhile)


@dataclass(frozen=True)
class RingExit(NoComm):
    """Exit of a region with sequence parallelism: multiply, then reduce-scatter."""

    chunked = True
    group: Group
    tokenwise: bool
    gather = staticmethod(gather_products)

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return x and the sum without a bias, which is added once to it."""
        return x, [scatter_products([x], [weight.t() for weight in weights], self.group, self.tokenwise)]

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        gathered, (d_x,) = self.gather(gradients[0], factors, self.group, self.tokenwise)
        meanwhile([gathered])
        return d_x if wanted else None


@dataclass(frozen=True)
class ChunkedEntry(NoComm):
    """Entry of a region without sequence parallelism: all-reduce in backward."""

    chunked = True
    group: Group

    def sum(self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[], object]) -> Tensor:
        return reduced_products(gradients, factors, self.group, meanwhile)


@dataclass(frozen=True)
class ChunkedExit(NoComm):
    """Exit of a region without sequence parallelism: all-reduce in forward."""

    chunked = True
    group: Group

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return x and the sum without a bias, which is added once to it."""
        return x, [reduced_products([x], [weight.t() for weight in weights], self.group)]


def reduced_products(
    xs: Sequence[Tensor], factors: Sequence[Tensor], group: Group, meanwhile: Callable[[], object] = lambda: None
) -> Tensor:
    """Return the sum over all ranks of sum_i x_i F_i: [b, s, k_i], [k_i, m] -> [b, s, m].

    It calls ``meanwhile`` during the last transfers.
    """
    b, s, _ = xs[0].shape
    rows = [x.flatten(0, 1) for x in xs]
    out = xs[0].new_empty(b * s, factors[0].shape[1])
    works = []
    for *parts, chunk in zip(*(x.chunk(CHUNKS) for x in rows), out.chunk(CHUNKS), strict=True):
        torch.mm(parts[0], factors[0], out=chunk)
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            chunk.addmm_(part, factor)
        works.append(start_all_reduce(chunk, group))
    meanwhile()
    for work in works:
        work.wait()
    return out.view(b, s, -1)
