"""Ulysses attention: exchange tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses").

Ranks hold all heads of some tokens. An all-to-all gives each rank some heads of all tokens for attention, and a second
one reverses it. With more ranks than key/value heads, each of these goes to several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_to_all_dims

HEADS, TOKENS = 1, 2  # dims of [b, a, s, d]


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int], group: Group | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads before attention, over the n ranks of a group.

    q changes from [b, a, s, d] to [b, a/n, sum of queries, d], k and v from [b, k, t, d] to
    [b, max(k/n, 1), sum of keys, d].

    Args:
        queries, keys: number of tokens of each rank.
    """
    if group is None:
        return q, k, v
    n = group.size()
    if k.shape[HEADS] < n:
        k, v = (x.repeat_interleave(n // x.shape[HEADS], dim=HEADS) for x in (k, v))
    # The key and value heads of each rank are adjacent, so one exchange moves both.
    both = torch.cat([x.unflatten(HEADS, (n, -1)) for x in (k, v)], dim=2).flatten(1, 2)
    q, both = (
        all_to_all_dims(x, group, HEADS, TOKENS, [x.shape[HEADS] // n] * n, lengths)
        for x, lengths in ((q, queries), (both, keys))
    )
    k, v = both.chunk(2, dim=HEADS)
    return q, k, v


def tokens_for_heads(out: Tensor, queries: Sequence[int], group: Group | None) -> Tensor:
    """Exchange [b, a/n, sum of queries, d] back for [b, a, s, d]."""
    if group is None:
        return out
    return all_to_all_dims(out, group, TOKENS, HEADS, queries, [out.shape[HEADS]] * group.size())
