"""What each gate chooses, against its paper's rule written out token by token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.catalog import Experts
from shoal.models.experts import gates


def scores(seed: int, b: int = 2, s: int = 7, count: int = 4) -> torch.Tensor:
    """Logits with ties among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (b, s, count), generator=generator).double()


seeds = st.integers(0, 10**6)
factors = st.sampled_from([0.0, 0.4, 1.0, 1.7])


def filled(choices: list[list[int]], room: int | None, count: int) -> set[tuple[int, int]]:
    """(token, expert) pairs that find a place: all first choices in order, then all second ones."""
    held, kept = [0] * count, set()
    for rank in range(max(map(len, choices))):
        for token, mine in enumerate(choices):
            if rank < len(mine) and (room is None or held[mine[rank]] < room):
                kept.add((token, mine[rank]))
            if rank < len(mine):
                held[mine[rank]] += 1
    return kept


def highest(row: torch.Tensor, k: int) -> list[int]:
    """Indices of the k highest; of equal ones the first."""
    return sorted(range(len(row)), key=lambda e: (-float(row[e]), e))[:k]


def pairs(chosen: torch.Tensor) -> set[tuple[int, int]]:
    return {tuple(pair) for pair in chosen.nonzero().tolist()}


@given(seeds, factors, st.integers(1, 3), st.sampled_from(["softmax", "sigmoid"]), st.booleans())
def test_top_k_takes_the_highest_that_have_room(
    seed: int, factor: float, k: int, score: str, normalise: bool
) -> None:
    experts = Experts(count=4, per_token=k, ffn=1, capacity_factor=factor, score=score, normalise=normalise, scale=2.0)
    logits, bias = scores(seed), scores(seed + 1)[0, 0]
    choice = gates.top_k(logits, experts, bias)
    exact = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    for b in range(len(logits)):
        wanted = [highest(exact[b, t] + bias, k) for t in range(7)]
        kept = filled(wanted, gates.capacity(experts, 7), 4)
        assert pairs(choice.chosen[b]) == kept
        assert choice.dropped[b].tolist() == [k - sum((t, e) in kept for e in wanted[t]) for t in range(7)]
        for t, e in kept:
            share = exact[b, t, e] / (exact[b, t, wanted[t]].sum() if normalise else 1)
            assert choice.weights[b, t, e] == pytest.approx(2 * float(share))
    assert not choice.weights[~choice.chosen].any()


@given(seeds, factors)
def test_switch_takes_one_and_weighs_it_by_its_probability(seed: int, factor: float) -> None:
    experts = Experts(count=4, ffn=1, gate="switch", capacity_factor=factor)
    logits = scores(seed)
    choice = gates.switch(logits, experts)
    shares = logits.softmax(-1)
    for b in range(len(logits)):
        assert pairs(choice.chosen[b]) == filled([highest(row, 1) for row in logits[b]], gates.capacity(experts, 7), 4)
        first = [highest(row, 1)[0] for row in logits[b]]
        part = torch.tensor([first.count(e) / 7 for e in range(4)])
        assert float(choice.balance[b]) == pytest.approx(4 * float((part * shares[b].mean(0)).sum()))
    torch.testing.assert_close(choice.weights, shares * choice.chosen)


@given(seeds, factors)
def test_gshard_takes_the_second_by_chance_and_after_all_first_ones(seed: int, factor: float) -> None:
    experts = Experts(count=4, per_token=2, ffn=1, gate="gshard", capacity_factor=factor)
    logits = scores(seed)
    draws = torch.rand(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    choice = gates.gshard(logits, experts, draws)
    shares = logits.softmax(-1)
    for b in range(len(logits)):
        wanted = []
        for t in range(7):
            first, second = highest(logits[b, t], 2)
            weight = float(shares[b, t, second] / (shares[b, t, first] + shares[b, t, second]))
            wanted.append([first, second] if 2 * weight > draws[b, t] else [first])
        assert pairs(choice.chosen[b]) == filled(wanted, gates.capacity(experts, 7), 4)


@given(seeds, st.integers(1, 3))
def test_noisy_top_k_is_top_k_of_noisy_logits(seed: int, k: int) -> None:
    experts = Experts(count=4, per_token=k, ffn=1, gate="noisy-top-k")
    clean, spread, draws = scores(seed), scores(seed + 1).abs() + 0.5, scores(seed + 2)
    choice = gates.noisy_top_k(clean, spread, experts, draws)
    noisy = clean + draws * spread
    for b in range(2):
        for t in range(7):
            mine = highest(noisy[b, t], k)
            assert set(choice.chosen[b, t].nonzero().flatten().tolist()) == set(mine)
            torch.testing.assert_close(choice.weights[b, t, mine], noisy[b, t, mine].softmax(-1))
    quiet = gates.noisy_top_k(clean, spread, experts, None)
    assert pairs(quiet.chosen) == pairs(gates.top_k(clean, experts.model_copy(update={"gate": "top-k"})).chosen)


@given(seeds, st.sampled_from([0.5, 1.0, 2.0]))
def test_experts_choose_their_highest_tokens(seed: int, factor: float) -> None:
    experts = Experts(count=4, per_token=1, ffn=1, gate="expert-choice", capacity_factor=factor)
    logits = scores(seed)
    choice = gates.expert_choice(logits, experts)
    shares = (logits.softmax(-1) * 2**20).round()
    take = min(7, math.ceil(factor * 7 / 4))
    for b in range(2):
        for e in range(4):
            assert set(choice.chosen[b, :, e].nonzero().flatten().tolist()) == set(highest(shares[b, :, e], take))
    assert choice.dropped.tolist() == (~choice.chosen.any(-1)).long().tolist()


def test_of_tokens_that_differ_by_rounding_experts_take_the_earlier() -> None:
    experts = Experts(count=2, per_token=1, ffn=1, gate="expert-choice", capacity_factor=1.0)
    logits = torch.tensor([[[0.3, 0.1]] * 6], dtype=torch.float64)
    logits[0, 3:, 0] += 4e-16
    assert gates.expert_choice(logits, experts).chosen.all(-1).tolist() == [[True] * 3 + [False] * 3]


@given(seeds, st.sampled_from(["top_k", "switch", "expert_choice"]))
def test_no_other_sequence_changes_a_choice(seed: int, gate: str) -> None:
    experts = Experts(count=4, ffn=1, capacity_factor=0.7)
    logits = scores(seed, b=3)
    together = getattr(gates, gate)(logits, experts)
    for b in range(3):
        for whole, alone in zip(together, getattr(gates, gate)(logits[b : b + 1], experts), strict=True):
            assert torch.equal(whole[b : b + 1], alone)


def test_the_balance_loss_is_least_where_all_are_alike() -> None:
    """1 where every expert gets as many, E where one gets all (Fedus et al. 2022, section 2.2)."""
    experts = Experts(count=4, ffn=1, gate="switch")
    even = 50.0 * torch.eye(4).repeat(2, 1).unsqueeze(0).double()
    one = 50.0 * torch.eye(4)[0].repeat(8, 1).unsqueeze(0).double()
    assert float(gates.switch(even, experts).balance) == pytest.approx(1)
    assert float(gates.switch(one, experts).balance) == pytest.approx(4)


def test_the_smooth_load_of_noisy_top_k_is_a_chance() -> None:
    """Shazeer et al. 2017, equation 9, against drawing each expert's own noise again, 20,000 times."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(1, 1, 4, generator=generator, dtype=torch.float64)
    spread = torch.rand(1, 1, 4, generator=generator, dtype=torch.float64) + 0.5
    draws = torch.randn(1, 1, 4, generator=generator, dtype=torch.float64)
    experts = Experts(count=4, per_token=2, ffn=1, gate="noisy-top-k")
    found = gates.noisy_top_k(clean, spread, experts, draws)
    noisy = (clean + draws * spread)[0, 0]
    again = torch.randn(20_000, generator=generator, dtype=torch.float64)
    loads = []
    for e in range(4):
        second = noisy[[o for o in range(4) if o != e]].sort(descending=True).values[1]
        loads.append(float((clean[0, 0, e] + again * spread[0, 0, e] > second).double().mean()))
    weights = found.weights[0].sum(0)
    expected = _variation(weights) + _variation(torch.tensor(loads, dtype=torch.float64))
    assert float(found.balance) == pytest.approx(expected, abs=0.02)


def _variation(x: torch.Tensor) -> float:
    return float(x.var(unbiased=False) / x.mean() ** 2)
