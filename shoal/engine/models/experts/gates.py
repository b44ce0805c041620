"""Gates of a mixture of experts: assign tokens to experts from router logits.

Each gate takes logits [b, s, E] of full sequences and decides per sequence (a "group" of Lepikhin et al. 2020, section
3.2). The result of a token therefore depends neither on other sequences nor on how the batch is split over devices.
Ties go to the lower index of expert or token. Shapes: b sequences, s tokens, E experts, k experts per token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.spec.catalog import Experts


class Choice(NamedTuple):
    """Result of a gate.

    Attributes:
        weights: [b, s, E] weight of each expert's output for each token, 0 where not chosen.
        chosen: [b, s, E] bool, True where the expert processes the token.
        dropped: [b, s] int64 number of a token's experts that were full (expert-choice: 1 for a token that no expert
            chose).
        balance: [b] load-balancing loss, minimal at equal loads.
    """

    weights: Tensor
    chosen: Tensor
    dropped: Tensor
    balance: Tensor


_TIE = 2.0**-20  # relative to a share; fp32 has 24 bits


def capacity(experts: Experts, s: int) -> int | None:
    """Return the tokens of a sequence that one expert takes, or None if unlimited.

    It is ceil(f k s / E) (Fedus et al. 2022, equation 3).

    >>> capacity(Experts(count=8, per_token=2, ffn=1, capacity_factor=1.25), 100)
    32
    """
    if not experts.capacity_factor:
        return None
    return min(s, _round_up(experts.capacity_factor * experts.per_token * s / experts.count))


def _taken(experts: Experts, s: int) -> int:
    """Return the tokens of a sequence that each expert takes if experts choose."""
    return min(s, _round_up((experts.capacity_factor or 1.0) * experts.per_token * s / experts.count))


def most_choices(experts: Experts, b: int, s: int, full: int) -> tuple[int, int]:
    """Return the largest number of choices, in total and per token, of s tokens in each of b sequences of ``full``."""
    if experts.gate == "expert-choice":
        return b * experts.count * min(s, _taken(experts, full)), experts.count
    return b * s * experts.per_token, experts.per_token


def _round_up(tokens: float) -> int:
    """Round up, tolerating float error: 1.05 x 6 x 1280 / 8 is 1008, but evaluates to slightly more."""
    return math.ceil(round(tokens, 6))


def top_k(logits: Tensor, experts: Experts, bias: Tensor | None = None) -> Choice:
    """Choose the k experts with the highest scores (Jiang et al. 2024, section 2.1; DeepSeek-AI 2024, eqs. 12 to 20).

    Args:
        bias: [E] added to the scores for the selection only.
    """
    scores = logits.softmax(-1) if experts.score == "softmax" else logits.sigmoid()
    for_choice = scores if bias is None else scores + bias.to(scores.dtype)
    ranks = _highest(_within_groups(for_choice, experts), experts.per_token)
    wanted = torch.stack(ranks).any(0)
    chosen = _apply_capacity(ranks, capacity(experts, logits.shape[1]))
    weights = scores * wanted
    if experts.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    shares = scores if experts.score == "softmax" else scores / scores.sum(-1, keepdim=True)
    return Choice(weights * chosen * experts.scale, chosen, (wanted & ~chosen).sum(-1), _balance(shares, wanted))


def _within_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Return the scores with -inf outside of each token's best groups of experts, [b, s, E]."""
    if experts.groups_per_token >= experts.groups:
        return scores
    grouped = scores.detach().unflatten(-1, (experts.groups, -1))
    summed = 1 if experts.score == "softmax" else min(2, grouped.shape[-1])
    best = _highest(grouped.topk(summed, -1).values.sum(-1), experts.groups_per_token)
    return grouped.masked_fill(~torch.stack(best).any(0).unsqueeze(-1), -math.inf).flatten(-2)


def switch(logits: Tensor, experts: Experts) -> Choice:
    """Choose the expert with the highest score, up to its capacity (Fedus et al. 2022, sections 2.1 and 2.2)."""
    shares = logits.softmax(-1)
    ranks = _highest(shares, 1)
    chosen = _apply_capacity(ranks, capacity(experts, logits.shape[1]))
    return Choice(shares * chosen, chosen, (ranks[0] & ~chosen).sum(-1), _balance(shares, ranks[0]))


def gshard(logits: Tensor, experts: Experts, draws: Tensor | None) -> Choice:
    """Choose the best expert, and the second with probability 2 x its weight (Lepikhin et al. 2020, algorithm 1).

    All first choices of a sequence take capacity before any second choice. A second choice that is not drawn takes
    none.

    Args:
        draws: [b, s] uniform in (0, 1); None always takes the second.
    """
    shares = logits.softmax(-1)
    first, second = _highest(shares, 2)
    both = shares * (first | second)
    weights = both / both.sum(-1, keepdim=True)
    if draws is not None:
        second = second & (2 * (weights * second).sum(-1) > draws).unsqueeze(-1)
    chosen = _apply_capacity([first, second], capacity(experts, logits.shape[1]))
    return Choice(weights * chosen, chosen, ((first | second) & ~chosen).sum(-1), _balance(shares, first))


def noisy_top_k(clean: Tensor, spread: Tensor, experts: Experts, draws: Tensor | None) -> Choice:
    """Choose the k highest noisy logits (Shazeer et al. 2017, equations 3 to 5; balance: equations 6 to 10).

    Args:
        clean: x W_g.
        spread: softplus(x W_noise), [b, s, E].
        draws: [b, s, E] standard normal; None adds no noise.
    """
    k = experts.per_token
    noisy = clean if draws is None else clean + draws.to(clean.dtype) * spread
    ranks = _highest(noisy, min(k + 1, experts.count))
    wanted = torch.stack(ranks[:k]).any(0)
    chosen = _apply_capacity(ranks[:k], capacity(experts, clean.shape[1]))
    weights = noisy.masked_fill(~wanted, -math.inf).softmax(-1)
    balance = _variation(weights.sum(1))
    if len(ranks) > k and draws is not None:
        # The probability that an expert is among the k highest if only its own noise is redrawn.
        kth = noisy.masked_fill(~ranks[k - 1], 0).sum(-1, keepdim=True)
        next_ = noisy.masked_fill(~ranks[k], 0).sum(-1, keepdim=True)
        above = torch.where(wanted, next_, kth)
        balance = balance + _variation(torch.special.ndtr((clean - above) / spread).sum(1))
    return Choice(weights * chosen, chosen, (wanted & ~chosen).sum(-1), balance)


def expert_choice(logits: Tensor, experts: Experts) -> Choice:
    """Let each expert take the highest-scoring tokens of a sequence (Zhou et al. 2022, section 3.2).

    A token's experts depend on later tokens, so such a model cannot generate token by token.
    """
    shares = logits.softmax(-1)
    take = _taken(experts, logits.shape[1])
    chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, sort_tokens(shares)[:, :take], True)
    unchosen = (~chosen.any(-1)).long()
    return Choice(shares * chosen, chosen, unchosen, shares.new_zeros(len(shares)))


def sort_tokens(scores: Tensor) -> Tensor:
    """Return the positions of tokens by descending score: [b, s, ..] -> [b, s, ..] int64.

    Scores that differ only by rounding count as ties, and ties go to the earlier token: tokens with identical prefixes
    (such as the first of two documents) have equal scores up to rounding, which depends on the layout.
    """
    return (scores.detach() / _TIE).round().argsort(dim=1, descending=True, stable=True)


def _highest(scores: Tensor, k: int) -> list[Tensor]:
    """Return one [b, s, E] one-hot bool per rank below k; ties go to the first expert."""
    index = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k].movedim(-1, 0)
    hot = torch.zeros((k, *scores.shape), dtype=torch.bool, device=scores.device)
    return list(hot.scatter_(-1, index.unsqueeze(-1), True))


def _apply_capacity(ranks: list[Tensor], capacity: int | None) -> Tensor:
    """Apply a capacity: first choices before second ones, earlier tokens before later ones."""
    if capacity is None:
        return torch.stack(ranks).any(0)
    taken = torch.zeros_like(ranks[0][:, :1], dtype=torch.int64)
    kept = []
    for wanted in ranks:
        place = wanted.cumsum(1) + taken  # counts from 1
        kept.append(wanted & (place <= capacity))
        taken = place[:, -1:]
    return torch.stack(kept).any(0)


def _balance(shares: Tensor, wanted: Tensor) -> Tensor:
    """Return E x sum over experts of (fraction of choices) x (mean share), [b]; 1 at equal loads.

    Fedus et al. 2022, equations 4 to 6; for k choices, DeepSeek-AI 2024, equations 17 to 20.
    """
    part = wanted.sum(1).to(shares.dtype) / wanted.sum((1, 2)).unsqueeze(-1)  # dividing integers would give float32
    return shares.shape[-1] * (part * shares.mean(1)).sum(-1)


def _variation(loads: Tensor) -> Tensor:
    """Return the squared coefficient of variation over the experts, [b, E] -> [b]."""
    mean = loads.mean(-1, keepdim=True)
    return ((loads - mean) / (mean + 1e-10)).square().mean(-1)
