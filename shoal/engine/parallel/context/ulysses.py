"""Heads for tokens (Jacobs et al. 2023, "DeepSpeed Ulysses"): attention over all tokens, for a part of the heads.

Ranks that each have all heads of some tokens exchange these, all to all, for some heads of all tokens; after attention,
back. What a rank sends is the same however many ranks there are, where a ring's share grows with it. But there cannot
be more ranks than heads; where there are more than key/value heads, each of these goes to several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_to_all_dims

HEADS, TOKENS = 1, 2  # dims of [b, a, s, d]


@dataclass(frozen=True)
class Ulysses:
    """The ranks at one place of the ring; alone, a rank exchanges nothing.

    Attributes:
        ranks: how many.
        group: of them, None for one.
    """

    ranks: int
    group: Group | None

    @classmethod
    def of(cls, mesh: Mesh) -> Ulysses:
        """Of a mesh. To be called by all ranks at the same point."""
        return cls(mesh.size("ulysses"), mesh.group("ulysses"))

    def heads_for_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[b, a, s, d] and twice [b, k, t, d] to [b, a/n, sum of queries, d] and [b, max(k/n, 1), sum of keys, d].

        Args:
            queries, keys: tokens of each rank.
        """
        if self.group is None:
            return q, k, v
        if k.shape[HEADS] < self.ranks:
            k, v = (x.repeat_interleave(self.ranks // x.shape[HEADS], dim=HEADS) for x in (k, v))
        # Each rank's part of the keys' heads and of the values' lie together, so that one exchange moves both.
        both = torch.cat([x.unflatten(HEADS, (self.ranks, -1)) for x in (k, v)], dim=2).flatten(1, 2)
        q, both = (
            all_to_all_dims(x, self.group, HEADS, TOKENS, self._heads(x.shape[HEADS]), lengths)
            for x, lengths in ((q, queries), (both, keys))
        )
        k, v = both.chunk(2, dim=HEADS)
        return q, k, v

    def tokens_for_heads(self, out: Tensor, queries: Sequence[int]) -> Tensor:
        """[b, a/n, sum of queries, d] back to [b, a, s, d]."""
        if self.group is None:
            return out
        return all_to_all_dims(out, self.group, TOKENS, HEADS, queries, self._heads(self.ranks * out.shape[HEADS]))

    def _heads(self, heads: int) -> list[int]:
        """Of each rank."""
        return [heads // self.ranks] * self.ranks
