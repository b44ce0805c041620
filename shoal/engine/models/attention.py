"""Attention without parameters: scaled dot products, rotary positions, masks, and the context shared by all layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from shoal.engine import kernels
from shoal.engine.kernels.flash_attention import flash_attention
from shoal.engine.kernels.rotary import rotate_packed, turn
from shoal.engine.models.attention_kernels import Kernel, sdpa_backends, takes_lengths
from shoal.engine.models.block_attention import BlockAttention, per_head
from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.router import RoutingContext
from shoal.engine.models.products import use_mkl_if_small, use_mkl_in_backward
from shoal.engine.models.segments import Segments, document_segments
from shoal.engine.streams import to_device
from shoal.spec.catalog import RopeScaling

# Limits of the query blocks in explicit attention: more blocks skip more scores, but small products are slow.
_MAX_BLOCKS, _MIN_ROWS = 4, 256


class Context(NamedTuple):
    """Inputs shared by all layers of one forward pass."""

    rotary: tuple[Tensor, Tensor] | None  # cos, sin: [s, d/2], or [b, 1, s, d/2] if positions differ between sequences
    mask: Tensor | Segments | None  # of layers that see all earlier tokens, as `AttentionCore` takes it
    part: Slice | None = None  # cache of earlier tokens if the sequence comes in slices: t = start + s
    routing: RoutingContext = RoutingContext()
    documents: Tensor | None = None  # [b, t] document numbers on the host, separated by the mask
    local_mask: Tensor | Segments | None = None  # of layers with a window
    local_rotary: tuple[Tensor, Tensor] | None = None  # of these, if their frequencies differ
    temperature: Tensor | None = None  # [s, 1] factors on queries of layers without positions

    def rotary_with(self, window: int | None) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of a layer with or without a window."""
        return self.rotary if window is None or self.local_rotary is None else self.local_rotary

    def mask_with(self, window: int | None) -> Tensor | Segments | None:
        """Return the mask of a layer with or without a window."""
        return self.mask if window is None else self.local_mask


def recomputed(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function and recompute its activations in backward instead of storing them (Chen et al. 2016)."""
    # Without dropout there is no generator state to restore.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Sinks(nn.Module):
    """One more score of each head in the softmax of attention, without a value: [a] (gpt-oss: OpenAI 2025)."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class AttentionCore(nn.Module):
    """Scaled dot-product attention, softmax(q k^T / sqrt(d)) v, causal or masked, with grouped query heads.

    With a window a query sees the last ``window`` tokens up to its own (Jiang et al. 2023, "Mistral 7B", section 2).

    Args:
        kernel: "sdpa" for fused kernels, of which `shoal.engine.models.attention_kernels` chooses, "explicit" for
            matrix products and a softmax (`shoal bench attention` measures both). With ``softcap``, scores are limited,
            by products in blocks of rows.
    """

    def __init__(self, kernel: Kernel = "sdpa", window: int | None = None, softcap: float | None = None):
        super().__init__()
        self.kernel: Kernel = kernel if softcap is None else "explicit"
        self.window, self.softcap = window, softcap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Segments | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention.

        Args:
            q: [b, a, s, d] in any strides with contiguous heads.
            k, v: [b, k, t, d].
            mask: [b or 1, 1, s, t] bool, True where attention is allowed; it must be causal and have the window.
                `Segments` attend to themselves alone. None is causal, with the queries as the last of the keys.
            sinks: [a], one more score of each head, without a value.

        Returns:
            [b, a, s, d].
        """
        s, t = q.shape[2], k.shape[2]
        window = self.window if self.window is not None and self.window < t else None
        if sinks is not None or self.softcap is not None:
            by_lengths = self.kernel == "sdpa" and takes_lengths(q.device, q.dtype, q.shape[3])
            if mask is None and (s < t or window) and not by_lengths:
                mask = causal_mask(s, t, q.device, window)[None, None]
            return BlockAttention.apply(q, k, v, mask, sinks, window, self.kernel, self.softcap)
        if isinstance(mask, Segments):
            return flash_attention(q, k, v, True, *mask, window)[0]
        if self.kernel == "explicit":
            return explicit_attention(q, k, v, mask, window)
        if mask is None and (s < t or window):
            if takes_lengths(q.device, q.dtype, q.shape[3]):
                return flash_attention(q, k, v, True, None, None, None, window)[0]
            mask = causal_mask(s, t, q.device, window)[None, None]
        if q.is_cuda:
            return _attend_on_cuda(q, k, v, mask)
        with use_mkl_if_small(k):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
        return use_mkl_in_backward(out, k)


def _attend_on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    backends = sdpa_backends(q.device, q.dtype, q.shape[3], "causal" if mask is None else "dense")
    if not {SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION} & set(backends):  # the others know no groups
        k, v = per_head(q, k), per_head(q, v)
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None = None) -> Tensor:
    """Compute attention by matrix products and a softmax; shapes as in `AttentionCore`.

    The mask must be causal and have the window. Queries are processed in blocks; a block skips the keys that only later
    tokens see, and those before its window. Two blocks save a quarter of the scores, four save three eighths. The
    scores take up to b a s t elements.
    """
    b, a, s, d = q.shape
    kv, t = k.shape[1:3]
    groups = a // kv
    q = (q * (1 / math.sqrt(d))).reshape(b, kv, groups, s, d)
    rows = max(_MIN_ROWS, -(-s // _MAX_BLOCKS))
    blocks = []
    for start in range(0, s, rows):
        stop = min(start + rows, s)
        n, last = stop - start, t - s + stop
        first = max(0, last - n - window + 1) if window else 0
        seen = last - first
        # Query heads that share a key head become rows of one product, so no key is copied.
        queries = q[:, :, :, start:stop].reshape(b, kv, groups * n, d)
        scores = (queries @ k[:, :, first:last].transpose(2, 3)).view(b, kv, groups, n, seen)
        # Adding a bias instead of filling lets the compiler use one pass over the scores; backward needs no mask.
        bias = torch.full((n, seen), -math.inf, dtype=q.dtype, device=q.device)
        if mask is None:
            hidden = bias.triu(seen - n + 1)
            bias = hidden + bias.tril(seen - n - window) if window else hidden
        else:
            bias = bias.masked_fill(mask[:, None, :, start:stop, first:last], 0.0)  # [b or 1, 1, 1, n, seen]
        weights = (scores + bias).softmax(-1).view(b, kv, groups * n, seen)
        blocks.append((weights @ v[:, :, first:last]).view(b, kv, groups, n, d))
    return torch.cat(blocks, dim=3).view(b, a, s, d)


def rotary_table(
    positions: Tensor, d: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position [s] times frequency, each [s, d/2] (Su et al. 2021, section 3.2.2)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = rotary_frequencies(d, theta, scaling, device=positions.device, dtype=exact)
    angles = torch.outer(positions.to(exact), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos.to(dtype), sin.to(dtype)


def rotary_frequencies(
    d: int, theta: float, scaling: RopeScaling | None = None, *, device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return the angle per position of each pair of elements, [d/2] (Su et al. 2021, section 3.2.2)."""
    frequencies = theta ** (-torch.arange(0, d, 2, device=device, dtype=dtype) / d)
    if scaling is None:
        return frequencies
    kept = _kept_frequencies(frequencies, theta, scaling)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _kept_frequencies(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the part of each frequency that is not divided, [d/2]: 1 for fast waves, 0 for slow ones."""
    if scaling.kind == "linear":
        return torch.zeros_like(frequencies)
    low, high, longest = scaling.low_frequency, scaling.high_frequency, scaling.original_max_sequence
    if scaling.kind == "llama3":
        turns = longest * frequencies / (2 * math.pi)
        return ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)  # equal in Llama 4: nothing is between

    def number(turns: float) -> float:
        """Return the number of the wave that makes these turns."""
        return len(frequencies) * math.log(longest / (turns * 2 * math.pi)) / math.log(theta)

    first, last = number(high), number(low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(0, first), min(2 * len(frequencies) - 1, last)
    waves = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    return 1 - ((waves - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) by the angles of each position. x: [b, a, s, d]."""
    if torch.compiler.is_compiling():  # the compiler fuses this form
        return turn(x, cos, sin)
    if kernels.use_fused(x):
        rotated, *_ = rotate_packed(x.transpose(1, 2).flatten(2), cos, sin, x.shape[1], 0)
        return rotated.transpose(1, 2)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Rotation with half of autograd's memory passes; backward rotates by the negative angles."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d = cos.shape[-1]
    y = x * torch.cat((cos, cos), dim=-1)
    y[..., :d].addcmul_(x[..., d:], sin, value=-1)
    y[..., d:].addcmul_(x[..., :d], sin)
    return y


class Positions(nn.Module):
    """Positions of the input tokens in their sequences."""

    def forward(self, start: int, s: int, device: torch.device) -> Tensor:
        """Return the positions of s tokens that follow ``start`` others: [s] int64."""
        return torch.arange(start, start + s, device=device)


class Mask(nn.Module):
    """Attention mask of the input tokens.

    Args:
        kernel, head_dim, window: of the attention that reads the mask. Without a width it may read a dense mask alone.
        chunked: the window cuts sequences into chunks, and attention stays inside a chunk too.
    """

    def __init__(
        self, kernel: Kernel = "sdpa", head_dim: int | None = None, window: int | None = None, chunked: bool = False
    ):
        super().__init__()
        self.window, self.chunked = window, chunked
        self.fused_width = head_dim if kernel == "sdpa" else None

    def forward(self, start: int, s: int, documents: Tensor | None, x: Tensor) -> Tensor | Segments | None:
        """Return the mask for `AttentionCore` of s tokens that follow ``start`` others.

        Args:
            documents: [b, t >= start + s] document number of each token, on the host; attention stays inside a
                document.
            x: hidden states, whose device and number format decide between a dense mask and segments.
        """
        by_lengths = self.fused_width is not None and takes_lengths(x.device, x.dtype, self.fused_width)
        t = start + s
        window = self.window if self.window is not None and self.window < t else None
        if window and self.chunked:
            documents = cut_chunks(documents, window, t, len(x) if by_lengths else 1)
        if documents is None:
            dense = (start or window) and not by_lengths
            return causal_mask(s, t, x.device, window)[None, None] if dense else None
        documents = documents[:, :t]
        if by_lengths:
            return document_segments(documents, s, x.device)
        if documents.device != x.device:  # chosen tokens' are on the device
            documents = to_device(documents, x.device)
        return document_mask(documents, s, window)


def causal_mask(s: int, t: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return the mask [s, t] bool in which the last s of t tokens see themselves and all earlier tokens.

    With a window they see the last ``window`` of these.
    """
    seen = torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)
    return seen if window is None else seen.triu(t - s - window + 1)


def cut_chunks(documents: Tensor | None, size: int, t: int, b: int = 1) -> Tensor:
    """Return document numbers [b, t] that also change at every multiple of ``size`` tokens, on the host.

    >>> cut_chunks(torch.tensor([[0, 0, 0, 1, 1]]), 2, 5)
    tensor([[0, 0, 1, 6, 7]])
    """
    chunks = torch.from_numpy(np.arange(t) // size)
    return chunks.expand(b, t) if documents is None else documents[:, :t] * t + chunks


def document_mask(documents: Tensor, s: int, window: int | None = None) -> Tensor:
    """Return the causal mask within documents for the last s tokens: [b, t] -> [b, 1, s, t] bool."""
    t = documents.shape[1]
    same = documents[:, t - s :].unsqueeze(2) == documents.unsqueeze(1)  # [b, s, t]
    return (same & causal_mask(s, t, documents.device, window)).unsqueeze(1)
