"""Causal or full attention with its log-sum-exp, and its backward, by torch's FlashAttention-2 on CUDA (Dao 2023).

The kernel takes grouped heads and any strides, and aligns a causal mask at the lower right, as a slice of a sequence
needs it. With segments, the tokens of all sequences form one row, which cumulative lengths cut into segments that do
not see each other: documents need no mask.

Backward takes the output and the log-sum-exp of full rows, so the keys may be a part of all that the queries see (ring
attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels.example import Example

_aten = torch.ops.aten
_TAGS = (torch.Tag.cudagraph_unsafe,)  # a recorded graph would keep the lengths that the host reads


def flash_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, longest: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `flash_attention` in plain PyTorch, with all scores in memory and in float32 at least."""
    rows, k, v = _by_query_head(q, k, v)
    scores = rows @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~visible(q, k, causal, q_ends, k_ends, window), -math.inf)
    total = scores.logsumexp(-1)
    return (_weights(scores, total) @ v).to(q.dtype), total.detach()


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in at least float32, with the key and value heads repeated: [b, a, s or t, d]."""
    exact, groups = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    keys, values = (x.to(exact).repeat_interleave(groups, dim=1) for x in (k, v))
    return q.to(exact), keys, values


def _weights(scores: Tensor, total: Tensor) -> Tensor:
    """Return the weights, with zeros where nothing is seen."""
    return (scores - total.clamp(min=torch.finfo(total.dtype).min).unsqueeze(-1)).exp()


def visible(
    q: Tensor, k: Tensor, causal: bool, q_ends: Tensor | None, k_ends: Tensor | None, window: int | None = None
) -> Tensor:
    """Return the scores that `flash_attention` does not leave out: [b or 1, 1, s, t] bool."""
    (b, _, s, _), t = q.shape, k.shape[2]
    if q_ends is None or k_ends is None:
        seen = torch.ones(1, s, t, dtype=torch.bool, device=q.device)
        seen = seen.tril(t - s) if causal else seen
        return (seen if window is None else seen.triu(t - s - window + 1)).unsqueeze(1)
    (row, q_left), (column, k_left) = (_number_tokens(ends, x * b) for ends, x in ((q_ends, s), (k_ends, t)))
    seen = row.view(b, s, 1) == column.view(b, 1, t)
    if causal:  # both counted from the end of their segment
        seen &= q_left.view(b, s, 1) <= k_left.view(b, 1, t)
    if window is not None:
        seen &= q_left.view(b, s, 1) + window > k_left.view(b, 1, t)
    return seen.unsqueeze(1)


def _number_tokens(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the segment of each token, and the number of tokens from it to the segment's end."""
    places = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    segment = torch.bucketize(places, ends[1:], right=True)
    return segment, ends[1:][segment] - places


@custom_op("shoal::flash_attention", mutates_args=(), tags=_TAGS)
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, longest: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(d)) v and the log-sum-exp of each row of scores.

    Args:
        q: [b, a, s, d], bf16 or fp16 on CUDA, d at most 256 and a multiple of 8.
        k, v: [b, k, t, d]; query heads share key/value heads in groups.
        causal: the last query of a segment (of a sequence without segments) sees all its keys, the one before it one
            less, and so on.
        q_ends, k_ends: [n + 1] int32 cumulative lengths of n segments of all b s queries and of all b t keys, from 0;
            query i of segment j sees keys of segment j alone. Segments may be empty.
        longest: [2] int32 on the host, the largest numbers of queries and of keys in a segment. A tensor, so that
            compiled code does not depend on the values.
        window: the last query of a segment sees the last ``window`` of its keys alone, the one before it also the key
            before these, and so on.

    Returns:
        The output [b, a, s, d], zeros where a query sees no key, and the log-sum-exp [b, a, s], -inf there, in at least
        float32. Only the output has a gradient.
    """
    out, total = flash_attention_reference(q, k, v, causal, q_ends, k_ends, None, window)
    return _empty_like(q, q_ends).copy_(out), total.contiguous()


@flash_attention.register_kernel("cuda")
def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, longest: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Call torch's kernel; arguments and results of `flash_attention`."""
    inputs, shape = [_rows(x, q_ends) for x in (q, k, v)], (len(q), q.shape[2])
    lengths = longest.tolist() if longest is not None else [q.shape[2], k.shape[2]]
    out, total, *_ = _aten._flash_attention_forward(
        *inputs, q_ends, k_ends, *lengths, 0.0, causal, False, **_left(window)
    )
    if q_ends is None:
        return out.transpose(1, 2), total.contiguous()
    # The kernel gives +inf where a query sees no key.
    total = total.masked_fill_(total.isposinf(), -math.inf).unflatten(1, shape).transpose(0, 1).contiguous()
    return out.unflatten(0, shape).transpose(1, 2), total


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, q_ends: Tensor | None = None, *_: Any) -> tuple[Tensor, Tensor]:
    total = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return _empty_like(q, q_ends), total


@custom_op("shoal::flash_attention_backward", mutates_args=(), tags=_TAGS)
def flash_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, longest: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, where ``out`` and ``total`` may be over more keys than k and v.

    Args:
        gradient: [b, a, s, d] gradient of ``out``.

    Other arguments as of `flash_attention`.
    """
    (rows, keys, values), groups = _by_query_head(q, k, v), q.shape[1] // k.shape[1]
    d_out, scale = gradient.to(total.dtype), 1 / math.sqrt(q.shape[3])
    scores = rows @ keys.transpose(2, 3) * scale
    weights = _weights(scores.masked_fill(~visible(q, k, causal, q_ends, k_ends, window), -math.inf), total)
    along = (d_out * out.to(total.dtype)).sum(-1, keepdim=True)
    d_scores = weights * (d_out @ values.transpose(2, 3) - along) * scale
    d_k, d_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (
        d_scores.transpose(2, 3) @ rows, weights.transpose(2, 3) @ d_out
    ))  # fmt: skip
    return (
        _empty_like(q, q_ends).copy_(d_scores @ keys), _empty_like(k, k_ends).copy_(d_k),
        _empty_like(v, k_ends).copy_(d_v),
    )  # fmt: skip


@flash_attention_backward.register_kernel("cuda")
def launch_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, longest: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call torch's kernel; arguments and results of `flash_attention_backward`."""
    inputs, shapes = [_rows(x, q_ends) for x in (gradient, q, k, v, out)], [(len(x), x.shape[2]) for x in (q, k, v)]
    lengths = longest.tolist() if longest is not None else [q.shape[2], k.shape[2]]
    # The kernel ignores the strides of the log-sum-exp: [b, a, s], or [a, b s] with segments.
    total = total.contiguous() if q_ends is None else total.transpose(0, 1).flatten(1).contiguous()
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    found = _aten._flash_attention_backward(
        *inputs, total, q_ends, k_ends, *lengths, 0.0, causal, seed, seed, **_left(window)
    )
    if q_ends is not None:
        found = [x.unflatten(0, shape) for x, shape in zip(found, shapes, strict=True)]
    d_q, d_k, d_v = (x.transpose(1, 2) for x in found)
    return d_q, d_k, d_v


@flash_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool,
    q_ends: Tensor | None = None, k_ends: Tensor | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q, q_ends), _empty_like(k, k_ends), _empty_like(v, k_ends)


def _left(window: int | None) -> dict[str, int]:
    """Return the kernel's argument: the keys that a query sees before the one aligned with it, at the lower right."""
    return {} if window is None else {"window_size_left": window - 1}


def _rows(x: Tensor, ends: Tensor | None) -> Tensor:
    """Return [b, a, s, d] in the kernel's order: [b, s, a, d], or [b s, a, d] with segments."""
    x = x.transpose(1, 2)
    return x if ends is None else x.flatten(0, 1)


def _empty_like(x: Tensor, ends: Tensor | None) -> Tensor:
    """Return an uninitialised tensor of x's shape with the strides of the kernel's result for x."""
    rows = torch.empty_like(_rows(x, ends))
    return (rows if ends is None else rows.unflatten(0, (len(x), x.shape[2]))).transpose(1, 2)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, *segments, ctx.window = inputs
    out, total = output
    ctx.mark_non_differentiable(total)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, total, *segments)


def _differentiate(ctx, gradient: Tensor | None, _: None):
    if gradient is None:
        return (None,) * 8
    q, k, v, out, total, *segments = ctx.saved_tensors
    found = flash_attention_backward(gradient, q, k, v, out, total, ctx.causal, *segments, ctx.window)
    return *found, None, None, None, None, None


flash_attention.register_autograd(_differentiate, setup_context=_save)


def examples() -> Iterator[Example]:
    """Yield calls with grouped heads: of a sequence, of a slice of one, and of segments of two sequences."""
    def numbers(*lengths: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(2, n, heads, 16).transpose(1, 2) for n, heads in zip(lengths, (4, 2, 2), strict=True))

    def ends(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for name, inputs in {
        "causal": (*numbers(40, 40, 40), True),
        "full": (*numbers(24, 40, 40), False),
        "slice": (*numbers(24, 40, 40), True),
        "segments": (*numbers(40, 40, 40), True, *[ends(0, 7, 40, 41, 80, 80)] * 2, ends(40, 40)),
        "window": (*numbers(24, 40, 40), True, None, None, None, 9),
        "window alone": (*numbers(24, 40, 40), False, None, None, None, 20),
        "segments with a window": (*numbers(40, 40, 40), True, *[ends(0, 7, 40, 41, 80, 80)] * 2, ends(40, 40), 9),
        "segments of a slice": (*numbers(8, 20, 20), True, ends(0, 0, 8, 10, 16), ends(0, 5, 20, 34, 40), ends(8, 15)),
    }.items():
        yield Example(
            f"flash attention, {name}", flash_attention, flash_attention_reference, inputs,
            (torch.bfloat16, torch.float16),
        )
