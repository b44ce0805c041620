"""The gates once more, each as its paper states it: one sequence, one token after the other, in Python's floats.

Nothing here is shared with `shoal.engine.models.experts.gates`. Each rule takes the logits of one sequence, a row for
each token, and returns a `Decision`.
"""

import math
from typing import NamedTuple


class Decision(NamedTuple):
    """Of one sequence.

    Attributes:
        weights: by (token, expert) for the choices that found room.
        dropped: for each token, choices that found none.
        balance: the loss.
    """

    weights: dict[tuple[int, int], float]
    dropped: list[int]
    balance: float


Rows = list[list[float]]


def softmax(row: list[float]) -> list[float]:
    parts = [math.exp(x - max(row)) for x in row]
    return [part / sum(parts) for part in parts]


def sigmoid(row: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-x)) for x in row]


def first_highest(row: list[float], k: int) -> list[int]:
    """Indices of the k highest; of equal ones the first."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def room_of(factor: float, k: int, tokens: int, experts: int) -> float:
    """Places of an expert: (tokens / experts) x capacity factor (Fedus et al. 2022, equation 3), for each of k."""
    return min(tokens, math.ceil(factor * k * tokens / experts)) if factor else math.inf


def mean_share(shares: Rows, expert: int) -> float:
    return sum(row[expert] for row in shares) / len(shares)


def top_k(
    logits: Rows, k: int, factor: float, bias: list[float], *, score: str, normalise: bool, scale: float,
    groups: int = 1, groups_per_token: int = 1,
) -> Decision:
    """Jiang et al. 2024, section 2.1; DeepSeek-AI 2024, equations 12 to 20: the bias counts in choosing alone, the
    weights are divided by the sum of those chosen, and the loss is sum f_i P_i with scores divided by their sum."""
    tokens, experts = len(logits), len(logits[0])
    scores = [(softmax if score == "softmax" else sigmoid)(row) for row in logits]
    wanted = []
    for row in scores:
        biased, size = [s + b for s, b in zip(row, bias, strict=True)], experts // groups
        of_groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        best = first_highest([sum(of[: 1 if score == "softmax" else 2]) for of in of_groups], groups_per_token)
        wanted.append(first_highest([s if e // size in best else -math.inf for e, s in enumerate(biased)], k))
    held, weights, dropped = [0] * experts, {}, [0] * tokens
    for rank in range(k):
        for t in range(tokens):
            e = wanted[t][rank]
            held[e] += 1
            if held[e] > room_of(factor, k, tokens, experts):
                dropped[t] += 1
                continue
            over = sum(scores[t][o] for o in wanted[t]) if normalise else 1.0
            weights[t, e] = scale * scores[t][e] / over
    shares = [[s / sum(row) for s in row] for row in scores]
    balance = 0.0
    for e in range(experts):
        chosen_by = sum(e in mine for mine in wanted)
        balance += experts / (k * tokens) * chosen_by * mean_share(shares, e)
    return Decision(weights, dropped, balance)


def switch(logits: Rows, factor: float) -> Decision:
    """Fedus et al. 2022, equations 1 to 6: y = p_i E_i(x) of the likeliest, N sum f_i P_i."""
    tokens, experts = len(logits), len(logits[0])
    shares = [softmax(row) for row in logits]
    held, weights, dropped = [0] * experts, {}, [0] * tokens
    for t, row in enumerate(shares):
        (e,) = first_highest(row, 1)
        held[e] += 1
        if held[e] <= room_of(factor, 1, tokens, experts):
            weights[t, e] = row[e]
        else:
            dropped[t] = 1
    balance = experts * sum(held[e] / tokens * mean_share(shares, e) for e in range(experts))
    return Decision(weights, dropped, balance)


def gshard(logits: Rows, factor: float, draws: list[float] | None) -> Decision:
    """Lepikhin et al. 2020, algorithm 1, with the loss times E^2, which makes it Switch's. A second choice that has no
    luck takes no place, as in the authors' code."""
    tokens, experts = len(logits), len(logits[0])
    shares = [softmax(row) for row in logits]
    room = room_of(factor, 2, tokens, experts)
    both = [first_highest(row, 2) for row in shares]
    held, weights, dropped = [0] * experts, {}, [0] * tokens

    def give(t: int, e: int) -> None:
        if held[e] < room:
            weights[t, e] = shares[t][e] / (shares[t][both[t][0]] + shares[t][both[t][1]])
        else:
            dropped[t] += 1
        held[e] += 1

    for t in range(tokens):
        give(t, both[t][0])
    balance = sum(held[e] / tokens * mean_share(shares, e) for e in range(experts)) / experts * experts**2
    for t, (first, second) in enumerate(both):
        g2 = shares[t][second] / (shares[t][first] + shares[t][second])
        if draws is None or 2 * g2 > draws[t]:
            give(t, second)
    return Decision(weights, dropped, balance)


def noisy_top_k(clean: Rows, spread: Rows, k: int, factor: float, draws: Rows | None) -> Decision:
    """Shazeer et al. 2017: equations 3 to 5 the gate, 6 and 7 importance, 8 to 11 load (appendix A)."""
    tokens, experts = len(clean), len(clean[0])
    noisy = [
        [c + (draws[t][e] * spread[t][e] if draws else 0.0) for e, c in enumerate(row)] for t, row in enumerate(clean)
    ]
    held, weights, dropped = [0] * experts, {}, [0] * tokens
    importance, load = [0.0] * experts, [0.0] * experts
    wanted = [first_highest(row, k) for row in noisy]
    for t, mine in enumerate(wanted):
        for e, share in zip(mine, softmax([noisy[t][e] for e in mine]), strict=True):
            importance[e] += share
    for rank in range(k):
        for t, mine in enumerate(wanted):
            e = mine[rank]
            held[e] += 1
            if held[e] > room_of(factor, k, tokens, experts):
                dropped[t] += 1
            else:
                weights[t, e] = softmax([noisy[t][o] for o in mine])[rank]
    balance = variation(importance)
    if draws and k < experts:
        for t in range(tokens):
            for e in range(experts):
                kth_excluding = sorted((noisy[t][o] for o in range(experts) if o != e), reverse=True)[k - 1]
                load[e] += (1 + math.erf((clean[t][e] - kth_excluding) / spread[t][e] / math.sqrt(2))) / 2
        balance += variation(load)
    return Decision(weights, dropped, balance)


def variation(loads: list[float]) -> float:
    """The squared coefficient of variation."""
    mean = sum(loads) / len(loads)
    return sum((x - mean) ** 2 for x in loads) / len(loads) / mean**2


def expert_choice(logits: Rows, k: int, factor: float) -> Decision:
    """Zhou et al. 2022, section 3.2: S = softmax(X W), and each expert takes the n k / e tokens of its column with the
    highest S, which are the weights. It needs no loss."""
    tokens, experts = len(logits), len(logits[0])
    shares = [softmax(row) for row in logits]
    take = min(tokens, math.ceil((factor or 1.0) * k * tokens / experts))
    weights = {}
    for e in range(experts):
        # Shares that differ by less than 2^-20 count as equal.
        for t in first_highest([float(round(row[e] * 2**20)) for row in shares], take):
            weights[t, e] = shares[t][e]
    met = {t for t, _ in weights}
    return Decision(weights, [int(t not in met) for t in range(tokens)], 0.0)
