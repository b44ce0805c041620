"""Bytes that a tensor-parallel rank sends for one layer and micro-batch, in closed form.

With n tokens of hidden width h, q numbers of queries a token, k of keys and of values (each head counted once for every
rank that has it), f hidden units of the feed-forward block, g matrices into it, on a grid of t = x y ranks (one
dimension: x = 1), in each direction

    along y    2 sums of [n, h/x], each (or its gather and scatter)     2 x 2 (y-1)/y n h/x
    along x    scattered: q, keys, values, what enters f; gathered:     (x-1)/x n (2 q + 2 k + (g + 1) f) / y
               what attention and the feed-forward block make

and for each norm 2 (x-1)/x sums a token along x: one for RMSNorm; for LayerNorm two in each direction. Along y a rank
sends 4 h (t - x) / (t x), which grows to 4 h in one dimension; with x ~ sqrt(t) all of it falls as 1/sqrt(t). So two
dimensions send less where tp is large beside (2 q + 2 k + (g + 1) f) / 4 h, some 3 for usual models:

>>> from shoal.spec.catalog import model_shape
>>> shape = model_shape("llama-3-8b")
>>> def numbers(tp: int, x: int) -> float:
...     return layer_bytes(shape, Layout(tp=tp, tp_x=x), 1, 1).blocks / shape.hidden  # a token, times h
>>> [round(numbers(tp, 1), 2) for tp in (4, 8, 16, 32)]
[3.0, 3.5, 3.75, 3.88]
>>> [round(min(numbers(tp, x) for x in (2, 4) if x < tp), 2) for tp in (4, 8, 16, 32)]
[4.25, 3.12, 2.59, 2.23]
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout


class TensorBytes(NamedTuple):
    """Sent by one rank, for one layer and micro-batch, in each direction.

    Attributes:
        along_y: into and out of the blocks; in one dimension that is all.
        along_x: inside them.
        norms: sums of both norms along x.
    """

    along_y: float
    along_x: float
    norms: float

    @property
    def blocks(self) -> float:
        """All but the norms, which are some 1/h of it."""
        return self.along_y + self.along_x


def layer_bytes(shape: ModelShape, layout: Layout, tokens: int, itemsize: int) -> TensorBytes:
    """Of a dense layer.

    Args:
        tokens: of a micro-batch that a rank's blocks see.
        itemsize: of a number while it is computed with.
    """
    x, y = layout.tp_x, layout.tp_y
    q, keys = shape.heads * shape.head_dim, max(shape.kv_heads, layout.tp) * shape.head_dim
    entering, numbers = (2, 1) if shape.family == "llama" else (1, 2)
    inside = 2 * q + 2 * keys + (entering + 1) * shape.ffn
    along_y = 2 * 2 * (y - 1) / y * tokens * shape.hidden / x
    along_x = (x - 1) / x * tokens * inside / y
    sums = 2 * 2 * (x - 1) / x * tokens / layout.token_multiple * numbers
    return TensorBytes(along_y * itemsize, along_x * itemsize, sums * max(4, itemsize))
