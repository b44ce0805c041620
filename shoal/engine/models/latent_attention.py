"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), as trained: keys and values per head.

Queries, and keys with values, are computed from one narrow vector per token each, the latents. Rotary positions would
mix with the matrix that makes keys of a latent, so a separate part of each query, and one key of all heads, is rotated.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.attention import AttentionCore, Context, Kernel, recomputed, rotate
from shoal.engine.models.feedforward import project
from shoal.engine.models.norm import RMSNorm
from shoal.spec.catalog import ModelShape

EPS = 1e-6  # of the norms of latents, in DeepSeek's models whatever the other norms have


class SharedLatents(nn.Module):
    """Hand the latents of a token to all heads."""

    def forward(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Return the latents [b, s, width] as they are: here all heads are in one place."""
        return latents


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values are computed from latents.

    The number of heads is derived from the output of the projections, so the module works on any subset of the heads.

    Attributes:
        q_down, q_latent_norm, q_up: from the hidden state to the latent of queries, its norm, and to the heads; or
            ``q`` alone, directly to the heads.
        kv_down: to the latent of keys and values, and to the rotated key that all heads share.
        kv_up: from that latent to the unrotated part of the keys, and to the values, head by head.
    """

    def __init__(
        self, shape: ModelShape, index: int, kernel: Kernel = "sdpa", *, recompute: bool = False
    ):
        super().__init__()
        assert shape.latent is not None
        self.latent, self.recompute = shape.latent, recompute
        self.head_dim, self.query_dim, self.value_dim = shape.head_dim, shape.query_dim, shape.value_dim
        self.score_factor = shape.rope_scaling.score_factor if shape.rope_scaling else 1.0
        h, rank, queries = shape.hidden, shape.latent.query_rank, shape.heads * shape.query_dim
        if rank is None:
            self.q = nn.Linear(h, queries, bias=False)
        else:
            self.q_down = nn.Linear(h, rank, bias=False)
        self.kv_down = nn.Linear(h, self.latent.key_value_rank + self.latent.rotary_dim, bias=False)
        if rank is not None:
            self.q_latent_norm = RMSNorm(rank, eps=EPS)
            self.q_up = nn.Linear(rank, queries, bias=False)
        self.kv_latent_norm = RMSNorm(self.latent.key_value_rank, eps=EPS)
        self.shared = SharedLatents()
        self.kv_up = nn.Linear(
            self.latent.key_value_rank, shape.heads * (shape.head_dim + shape.value_dim), bias=False
        )
        self.window = shape.reach(index)
        self.core = AttentionCore(kernel, self.window, shape.softcap)
        self.out = nn.Linear(shape.heads * shape.value_dim, h, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert context.rotary is not None
        q, k, v = self._heads(x, *context.rotary)  # [b, a, s, d]
        if context.part is not None:
            k, v = context.part.extend(self, k, v)  # [b, a, t, d]
        core = partial(recomputed, self.core) if self.recompute else self.core
        o = core(q, k, v, context.mask_with(self.window))[..., : self.value_dim]  # [b, a, s, d_v]
        return self.out(o.transpose(1, 2).flatten(2))  # [b, s, h]

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys by head, and values with zeros up to the same width, as attention kernels take it."""
        wide, r = self.query_dim, self.latent.rotary_dim
        parts = (self.latent.key_value_rank, r)
        if self.latent.query_rank is None:
            compressed, shared_key = self.kv_down(x).split(parts, -1)
            compressed, shared_key = self.shared(self.kv_latent_norm(compressed), shared_key)
            q = self.q(x)
        else:
            for_queries, for_keys = project(x, self.q_down, self.kv_down)
            compressed, shared_key = for_keys.split(parts, -1)
            normalised = self.q_latent_norm(for_queries), self.kv_latent_norm(compressed)
            for_queries, compressed, shared_key = self.shared(*normalised, shared_key)
            q = self.q_up(for_queries)
        q = q.unflatten(-1, (-1, wide))  # [b, s, a, d + r]
        k, v = self.kv_up(compressed).unflatten(-1, (-1, self.head_dim + self.value_dim)).split(
            (self.head_dim, self.value_dim), -1
        )
        plain, rotated = q.split((self.head_dim, r), -1)
        q = torch.cat((plain, _rotate(rotated, cos, sin)), -1)
        if self.score_factor != 1:
            q = q * self.score_factor
        k = torch.cat((k, _rotate(shared_key.unsqueeze(2), cos, sin).expand(-1, -1, k.shape[2], -1)), -1)
        v = F.pad(v, (0, wide - self.value_dim))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [b, s, a, r] by the angles of each position."""
    return rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)
