"""Rotary positions of queries and keys, read from one packed product of q, k and v (Su et al. 2021, section 3.4.2).

The packed product has, for each token, the query heads, then the key heads, then the value heads. The results are
separate tensors with heads after tokens, which attention reads without another copy. Backward rotates by the negative
angles and writes one packed gradient, which the product before needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.operators import custom_op


def rotate_packed_reference(
    packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed product and rotate queries and keys, in plain PyTorch; see `rotate_packed`."""
    b, s, width = packed.shape
    d = width // (heads + 2 * kv_heads)
    q, k, v = packed.view(b, s, -1, d).split((heads, kv_heads, kv_heads), dim=2)
    cos, sin = cos.view(-1, s, 1, d // 2), sin.view(-1, s, 1, d // 2)
    return turn(q, cos, sin), turn(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]); cos and sin have half of the width of x."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@custom_op("shoal::rotate_packed")
def rotate_packed(
    packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the pairs (x[i], x[i + d/2]) of queries and keys by the angles of each position.

    Args:
        packed: [b, s, (a + 2 k) d], with a ``heads`` and k ``kv_heads``; with 0 of these, queries or keys alone.
        cos, sin: [s, d/2], or [b, 1, s, d/2] if positions differ between sequences.

    Returns:
        q [b, s, a, d], k [b, s, k, d], v [b, s, k, d].
    """
    return rotate_packed_reference(packed, cos, sin, heads, kv_heads)


rotate_packed.register_kernel("cuda")(launch("rotary", "forward"))


@rotate_packed.register_fake
def _(packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int):
    b, s, width = packed.shape
    d = width // (heads + 2 * kv_heads)
    return tuple(packed.new_empty(b, s, n, d) for n in (heads, kv_heads, kv_heads))


@custom_op("shoal::rotate_packed_backward")
def rotate_packed_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the packed gradient [b, s, (a + 2 k) d] of the gradients of `rotate_packed`'s results."""
    _, s, _, d = d_q.shape
    cos, sin = cos.view(-1, s, 1, d // 2), -sin.view(-1, s, 1, d // 2)
    return torch.cat((turn(d_q, cos, sin), turn(d_k, cos, sin), d_v), dim=2).flatten(2)


rotate_packed_backward.register_kernel("cuda")(launch("rotary", "backward"))


@rotate_packed_backward.register_fake
def _(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, s, heads, d = d_q.shape
    return d_q.new_empty(b, s, (heads + 2 * d_k.shape[2]) * d)


def _save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, cos, sin, *_ = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, d_q: Tensor, d_k: Tensor, d_v: Tensor):
    gradients = (gradient.contiguous() for gradient in (d_q, d_k, d_v))
    return rotate_packed_backward(*gradients, *ctx.saved_tensors), None, None, None, None


rotate_packed.register_autograd(_differentiate, setup_context=_save)


def examples() -> Iterator[Example]:
    """Yield calls with shared positions and with positions of each sequence, and heads of an odd number and width."""
    for heads, kv_heads, d, shared in ((4, 2, 16, True), (14, 3, 10, False), (3, 0, 16, True)):
        angles = torch.randn(5, d // 2) if shared else torch.randn(2, 1, 5, d // 2)
        packed = torch.randn(2, 5, (heads + 2 * kv_heads) * d)
        yield Example(
            f"rotate_packed, {heads} heads", rotate_packed, rotate_packed_reference,
            (packed, angles.cos(), angles.sin(), heads, kv_heads), gradients=(0,),
        )
