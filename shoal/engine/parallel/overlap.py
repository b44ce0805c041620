"""Collectives of tensor parallelism that go on while the product that they belong to is made, part by part.

A product over all of a sequence does not need all of it at once (Wang et al. 2023, "Overlap communication with
dependent computation via decomposition in large deep learning models", section 4). With sequence parallelism, whose
parts lie on the ranks of a ring:

- *gather, then multiply*: a rank multiplies its own part while the next arrives from its neighbour, and passes on what
  it has (`gather_products`);
- *multiply, then sum and scatter*: it begins with the part that has the longest way, passes the sum so far on, and
  multiplies the next part meanwhile; its own part is last (`scatter_products`).

The forward of a region's entry gathers and the backward of its exit does; the other two scatter. Each sends what the
collective would send, (n-1)/n of [b, s, h].

The feed-forward block works on each token by itself, so there the parts lie one after the other: of several sequences
that is not the order of their tokens, but each part is one matrix.

Without sequence parallelism the products of the exit (in forward) and of the entry (in backward) are made in `CHUNKS`
runs of tokens, whose sums are on their way while the next is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import Pending, start_all_reduce, start_shift
from shoal.engine.parallel.weight_grad import Meanwhile, NoComm

SEQUENCE = 1  # dim of [b, s, h] that sequence parallelism splits
CHUNKS = 2  # of an all-reduce: more of them hide more, and make smaller products


def multiply_into(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write x F into ``out``: [b, s, k], [k, n] -> [b, s, n]; both may be parts of longer sequences."""
    if x.is_contiguous() and out.is_contiguous():
        torch.mm(x.flatten(0, 1), factor, out=out.view(-1, out.shape[-1]))
    else:
        torch.bmm(x, factor.expand(len(x), *factor.shape), out=out)


def parts_of(x: Tensor, n: int, tokenwise: bool) -> Tensor | tuple[Tensor, ...]:
    """Each rank's part [b, s/n, k] of [b, s, k], as views.

    Args:
        tokenwise: the parts lie one after the other, whatever the order of the tokens then is.
    """
    return x.view(n, len(x), -1, x.shape[-1]) if tokenwise else x.chunk(n, SEQUENCE)


def pass_on(x: Tensor, group: Group, into: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Start sending contiguous ``x`` to the next rank of the ring: (what will come from the one before, both)."""
    arriving = torch.empty_like(x) if into is None else into
    rank, ranks = group.rank(), group.ranks
    return arriving, start_shift(x, ranks[(rank + 1) % len(ranks)], arriving, ranks[rank - 1], group)


def gather_products(
    x: Tensor, factors: Sequence[Tensor], group: Group, tokenwise: bool
) -> tuple[Tensor, list[Tensor]]:
    """All parts of x, and their products with each factor, of which each part's is made when it is here.

    Args:
        x: [b, s/n, k], this rank's part.
        factors: [k, m_i].
        tokenwise: as in `parts_of`, of what is returned.

    Returns:
        [b, s, k], and of each factor [b, s, m_i].
    """
    n, rank = group.size(), group.rank()
    b, part, k = x.shape
    whole = x.new_empty(b, n * part, k)
    results = [x.new_empty(b, n * part, factor.shape[1]) for factor in factors]
    places = parts_of(whole, n, tokenwise)
    outs = [parts_of(result, n, tokenwise) for result in results]
    here = x.contiguous()
    places[rank].copy_(here)
    for hop in range(n):
        at, following = (rank - hop) % n, places[rank - hop - 1]
        if hop + 1 < n:
            arriving, exchange = pass_on(here, group, following if following.is_contiguous() else None)
        for factor, out in zip(factors, outs, strict=True):
            multiply_into(here, factor, out[at])
        if hop + 1 < n:
            exchange.wait()
            here = arriving
            if not following.is_contiguous():
                following.copy_(here)
    return whole, results


def scatter_products(
    xs: Sequence[Tensor], factors: Sequence[Tensor], group: Group, tokenwise: bool,
    meanwhile: Callable[[], object] = lambda: None,
) -> Tensor:
    """This rank's part of the sum over all ranks of the sum over i of x_i F_i.

    Args:
        xs: [b, s, k_i].
        factors: [k_i, m].
        tokenwise: as in `parts_of`, of the xs.
        meanwhile: called while the last sum is on its way.

    Returns:
        [b, s/n, m]; sums are added in the order of the ring that ends here.
    """
    n, rank = group.size(), group.rank()
    b, s, _ = xs[0].shape
    parts = [parts_of(x.contiguous() if tokenwise else x, n, tokenwise) for x in xs]
    sums: tuple[Tensor, Pending] | None = None  # of the ranks before, on their way
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
class RingEntry(NoComm):
    """Into a region with sequence parallelism: gather, then multiply."""

    group: Group
    tokenwise: bool

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return gather_products(x, factors, self.group, self.tokenwise)

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        if not wanted:
            return super().backward(gradients, factors, meanwhile, wanted)
        return scatter_products(gradients, factors, self.group, self.tokenwise, lambda: meanwhile(gradients))


@dataclass(frozen=True)
class RingExit(NoComm):
    """Out of it: multiply, then sum and scatter."""

    group: Group
    tokenwise: bool

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return x, [scatter_products([x], factors, self.group, self.tokenwise)]

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        whole, (d_x,) = gather_products(gradients[0], factors, self.group, self.tokenwise)
        meanwhile([whole])
        return d_x if wanted else None


@dataclass(frozen=True)
class ChunkedEntry(NoComm):
    """Into a region without it: backward sums over the ranks."""

    group: Group

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        if not wanted:
            return super().backward(gradients, factors, meanwhile, wanted)
        return reduced_products(gradients, factors, self.group, lambda: meanwhile(gradients))


@dataclass(frozen=True)
class ChunkedExit(NoComm):
    """Out of it: forward does."""

    group: Group

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return x, [reduced_products([x], factors, self.group)]


def reduced_products(
    xs: Sequence[Tensor], factors: Sequence[Tensor], group: Group, meanwhile: Callable[[], object] = lambda: None
) -> Tensor:
    """The sum over all ranks of the sum over i of x_i F_i: [b, s, k_i], [k_i, m] -> [b, s, m].

    Args:
        meanwhile: called while the last sums are on their way.
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
