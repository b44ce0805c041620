"""Bytes that a context-parallel rank sends for one layer and micro-batch, in closed form.

With T tokens at each of R places of the ring, U ranks per place, k key/value heads and a heads of width d on a rank:

    ring       forward     R - 1 blocks of keys and values                     2 b (T/U) max(k, U) d each
               backward    the same again, and one gradient per block          these in float32 at least
    exchange   forward     (U - 1)/U of queries, keys, values and output       b T/U d (2 a + 2 max(k, U))
               backward    the same

(Liu et al. 2023, section 3.2; Jacobs et al. 2023, section 3.2.) For a fixed sequence length, a rank's ring bytes are
nearly independent of the number of ranks, and its exchange bytes decrease with it. Grouped key/value heads make both
cheaper, the ring more so. The formulas are exact if every rank has equally many tokens; otherwise they give an upper
bound, from the largest share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout, Recompute


class ContextBytes(NamedTuple):
    """Bytes sent by one rank for one layer and micro-batch.

    Attributes:
        block: keys and values of one place of the ring.
        gradient: their gradients.
        ring_forward, ring_backward: ring transfers.
        exchange_in, exchange_out: all-to-all before and after attention; the backward reverses them.
    """

    block: int
    gradient: int
    ring_forward: int
    ring_backward: int
    exchange_in: int
    exchange_out: int

    @property
    def exchange(self) -> int:
        """Bytes of both all-to-alls; equal for a forward and a backward."""
        return self.exchange_in + self.exchange_out

    def step(self, recompute: Recompute) -> tuple[int, int]:
        """Return the bytes of a forward and a backward, ring and exchange; recomputation sends again.

        Selective recomputation ends with the core, so its output is not exchanged again.
        """
        again = {"none": (0, 0), "selective": (1, self.exchange_in), "full": (1, self.exchange)}[recompute]
        return (1 + again[0]) * self.ring_forward + self.ring_backward, 2 * self.exchange + again[1]


def tokens_here(layout: Layout, s: int) -> int:
    """Return the tokens of a sequence of s tokens on the context-parallel rank with the most.

    >>> tokens_here(Layout(cp=4), 32), tokens_here(Layout(cp=4), 33), tokens_here(Layout(cp=4, ulysses=2), 33)
    (8, 9, 9)
    """
    units = math.ceil(s / layout.token_multiple)
    return math.ceil(math.ceil(units / layout.ring) / layout.ulysses) * layout.token_multiple


def kv_heads(shape: ModelShape, layout: Layout) -> int:
    """Return the key/value heads of a rank; each rank of the exchange has at least one."""
    return max(1, shape.kv_heads // layout.tp, layout.ulysses)


def layer_bytes(shape: ModelShape, layout: Layout, s: int, itemsize: int) -> ContextBytes:
    """Return the bytes that one layer sends.

    Args:
        s: tokens of the full sequence.
        itemsize: bytes of the compute dtype.
    """
    b, n, d = layout.micro_batch, tokens_here(layout, s), shape.head_dim
    keys = 2 * b * n * kv_heads(shape, layout) * d  # elements: U times as many tokens, 1/U of the heads
    block, gradient = keys * itemsize, keys * max(4, itemsize)
    steps, u = layout.ring - 1, layout.ulysses
    queries = b * n * shape.heads // layout.tp * d
    into, out = (numbers * itemsize * (u - 1) // u for numbers in (queries + keys, queries))
    return ContextBytes(block, gradient, steps * block, steps * (block + gradient), into, out)
