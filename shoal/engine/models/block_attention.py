"""Attention of one block of scores with its log-sum-exp, and its backward from the results of the full row.

Ring attention consists of such blocks, and attention with capped scores or with sinks, which fused kernels do not have,
is one.
With the output o_i and the log-sum-exp l_i of every block of a row, the row's are

    l = log sum_i exp l_i        o = sum_i exp(l_i - l) o_i

(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; used in ring attention by Liu et al. 2023).
Given l, the weights of a block are exp(scores - l), so backward needs no state of the block's forward (Dao et al.
2022, "FlashAttention", algorithm 4).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shoal.engine.kernels.flash_attention import flash_attention, flash_attention_backward
from shoal.engine.models.attention_kernels import Kernel, takes_lengths
from shoal.engine.models.products import use_mkl_if_small
from shoal.engine.models.segments import Segments

_ROWS = 256  # queries whose scores exist at once in explicit attention

_aten = torch.ops.aten


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Segments | None = None, *, causal: bool = False,
    window: int | None = None, kernel: Kernel = "sdpa", softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(d)) v over a subset of the keys.

    Args:
        q: [b, a, n, d].
        k, v: [b, k, t, d]; query heads share key/value heads in groups.
        mask: [b, 1, n, t] bool, True where attention is allowed, or segments that attend to themselves alone; combined
            with causality if ``causal``.
        causal: query i sees the first i + 1 keys; requires n = t.
        window: number of the last keys that the last query sees, the one before it one more, and so on; for kernels
            that take lengths alone, and in a dense mask already.
        kernel: "sdpa" for torch's fused kernels where supported, or "explicit".
        softcap: limit of the scores (`cap`), with the kernel "explicit" alone.

    Returns:
        The output [b, a, n, d], zeros where a query sees nothing, and the log-sum-exp [b, a, n] of the scores, -inf
        there, in at least float32.
    """
    which = _kernel(q, mask, kernel)
    if isinstance(mask, Segments) or which == "flash":
        return flash_attention(q, k, v, causal, *_segments(mask), window)
    k, v = per_head(q, k), per_head(q, v)  # other kernels that return the log-sum-exp do not support grouped heads
    if which == "explicit":
        return _attend_explicitly(q, k, v, mask, causal, softcap)
    bias = _bias(mask, q.dtype)
    with use_mkl_if_small(k):
        out, total = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask is None, attn_mask=bias
        )
    if mask is not None:
        total = total.masked_fill(~mask.any(-1), -math.inf)
    return out, total


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor,
    mask: Tensor | Segments | None = None, *, causal: bool = False, window: int | None = None, kernel: Kernel = "sdpa",
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's contribution to the gradients of q, k and v.

    Args:
        gradient: [b, a, n, d], gradient of the rows' full output.
        out, total: the rows' full output and log-sum-exp, over all blocks.

    Other arguments as in `attend`.
    """
    which, groups = _kernel(q, mask, kernel), q.shape[1] // k.shape[1]
    if isinstance(mask, Segments) or which == "flash":
        return flash_attention_backward(gradient, q, k, v, out, total, causal, *_segments(mask), window)
    k, v = per_head(q, k), per_head(q, v)
    if which == "explicit":
        d_q, d_k, d_v = _explicit_backward(gradient, q, k, v, out, total, mask, causal, softcap)
    else:
        with use_mkl_if_small(k):
            d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, out, total, 0.0, causal and mask is None, attn_mask=_bias(mask, q.dtype)
            )
    if groups > 1:
        d_k, d_v = (d.unflatten(1, (-1, groups)).sum(2) for d in (d_k, d_v))
    return d_q, d_k, d_v


def _kernel(q: Tensor, mask: Tensor | Segments | None, kernel: Kernel) -> Literal["explicit", "flash", "cpu"]:
    """Return the kernel that returns the log-sum-exp.

    It is flash attention on CUDA: cuDNN's log-sum-exp has a layout that depends on its version and on strides.
    """
    if kernel == "explicit":
        return kernel
    if mask is None and takes_lengths(q.device, q.dtype, q.shape[3]):
        return "flash"
    return "cpu" if q.device.type == "cpu" else "explicit"


def _segments(mask: Tensor | Segments | None) -> Segments | tuple[None, None, None]:
    return mask if isinstance(mask, Segments) else (None, None, None)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the additive bias of a mask, as torch's CPU kernel expects it."""
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


class BlockAttention(torch.autograd.Function):
    """Attention with limited scores (Bello et al. 2016, "Neural combinatorial optimization"), or with sinks."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Segments | None, sinks: Tensor | None,
        window: int | None, kernel: Kernel, softcap: float | None,
    ) -> Tensor:
        """Compute attention; see `attend`. None is the causal mask.

        Args:
            sinks: [a], one more score in each row of a head, without a value.
        """
        causal = not isinstance(mask, Tensor)
        out, total = attend(q, k, v, mask, causal=causal, window=window, kernel=kernel, softcap=softcap)
        if sinks is not None:
            more = sinks.to(total.dtype).view(-1, 1)  # [a, 1]
            out = out * torch.sigmoid(total - more).unsqueeze(-1).to(out.dtype)
            total = torch.logaddexp(total, more)
        dense = None if isinstance(mask, Segments) else mask
        ctx.save_for_backward(q, k, v, out, total, dense, sinks)
        ctx.segments = mask if dense is None else None
        ctx.how = {"causal": causal, "window": window, "kernel": kernel, "softcap": softcap}
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, k, v, out, total, mask, sinks = ctx.saved_tensors
        found = attend_backward(gradient, q, k, v, out, total, ctx.segments if mask is None else mask, **ctx.how)
        d_sinks = None if sinks is None else sinks_gradient(gradient, out, total, sinks)
        return *found, None, d_sinks, None, None, None


def sinks_gradient(gradient: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [a]; other arguments as in `attend_backward`, with the sinks in ``total``."""
    along = (gradient.to(total.dtype) * out).sum(-1)  # [b, a, n]
    return -((sinks.to(total.dtype).view(-1, 1) - total).exp() * along).sum((0, 2)).to(sinks.dtype)


def per_head(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values [b, k, t, d] for each query head of q [b, a, s, d]: -> [b, a, t, d]."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, dim=1)


def cap(x: Tensor, limit: float | None) -> Tensor:
    """Limit values to limit x tanh(x / limit); None leaves them."""
    return x if limit is None else (x / limit).tanh() * limit


def _scores(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    """Return the scores of all pairs, in at least float32."""
    scores = q @ k.transpose(-1, -2)
    return cap((scores.float() if scores.dtype.itemsize < 4 else scores) * (1 / math.sqrt(q.shape[-1])), softcap)


def _hide(scores: Tensor, mask: Tensor | None, causal: bool, start: int) -> Tensor:
    """Return the scores of rows from ``start`` on with -inf where attention is not allowed."""
    n, t = scores.shape[-2:]
    if mask is not None:
        return scores.masked_fill(~mask[:, :, start : start + n], -math.inf)
    if causal:
        hidden = torch.ones(n, t, dtype=torch.bool, device=scores.device).triu(start + 1)
        return scores.masked_fill(hidden, -math.inf)
    return scores


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor]:
    b, a, n, d = q.shape
    out = v.new_empty(b, n, a, d).transpose(1, 2)  # heads inside tokens, as the next layer reads it
    totals = []
    for start in range(0, q.shape[2], _ROWS):
        scores = _hide(_scores(q[:, :, start : start + _ROWS], k, softcap), mask, causal, start)
        total = scores.logsumexp(-1, keepdim=True)
        weights = (scores - total.clamp(min=torch.finfo(total.dtype).min)).exp()  # zeros where nothing is seen
        out[:, :, start : start + _ROWS] = weights.to(v.dtype) @ v
        totals.append(total.squeeze(-1))
    return out, torch.cat(totals, 2)


def _explicit_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None, causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    along = (gradient.to(total.dtype) * out).sum(-1, keepdim=True)  # [b, a, n, 1]
    d_q = torch.empty_like(q)
    d_k, d_v = torch.zeros_like(k, dtype=total.dtype), torch.zeros_like(v, dtype=total.dtype)
    for start in range(0, q.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        some, d_some = q[:, :, rows], gradient[:, :, rows]
        scores = _scores(some, k, softcap)
        weights = (_hide(scores, mask, causal, start) - total[:, :, rows].unsqueeze(-1)).exp()
        d_scores = weights * ((d_some @ v.transpose(-1, -2)) - along[:, :, rows]) * scale
        if softcap is not None:
            d_scores *= 1 - (scores / softcap).square()
        d_v += weights.to(v.dtype).transpose(-1, -2) @ d_some
        d_q[:, :, rows] = d_scores.to(k.dtype) @ k
        d_k += d_scores.to(q.dtype).transpose(-1, -2) @ some
    return d_q, d_k, d_v
