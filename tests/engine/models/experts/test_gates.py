"""What each gate decides, against its paper's rule written out token by token (`papers`)."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.engine.models.experts import gates
from shoal.spec.catalog import Experts
from tests.engine.models.experts import papers
from tests.engine.models.experts.papers import Decision


def scores(seed: int, b: int = 2, s: int = 7, count: int = 4) -> torch.Tensor:
    """Logits with ties among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (b, s, count), generator=generator).double()


few = settings(max_examples=40)  # of 14 decisions each
seeds = st.integers(0, 10**6)
factors = st.sampled_from([0.0, 0.4, 1.0, 1.7])


@example(105, 6, 1280, 8)
@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 4096), st.sampled_from([4, 8, 64]))
def test_the_capacity_is_that_of_the_formula(hundredths, per_token, s, count):
    """ceil(f k s / E) of f as it is written, which floating point has only nearly: 1.05 x 6 x 1280 / 8 is 1008."""
    experts = Experts(count=count, per_token=min(per_token, count), ffn=1, capacity_factor=hundredths / 100)
    wanted = math.ceil(Fraction(hundredths, 100) * experts.per_token * s / count)
    assert gates.capacity(experts, s) == min(s, wanted)


def agree(choice: gates.Choice, papers: list[Decision]) -> None:
    """In everything, for every sequence."""
    for b, paper in enumerate(papers):
        assert {tuple(pair) for pair in choice.chosen[b].nonzero().tolist()} == set(paper.weights)
        assert choice.dropped[b].tolist() == paper.dropped
        expected = torch.zeros_like(choice.weights[b])
        for place, weight in paper.weights.items():
            expected[place] = weight
        torch.testing.assert_close(choice.weights[b], expected, rtol=1e-12, atol=0)
        assert float(choice.balance[b]) == pytest.approx(paper.balance, rel=1e-9)


@few
@given(seeds, factors, st.integers(1, 3), st.sampled_from(["softmax", "sigmoid"]), st.booleans())
def test_top_k(seed: int, factor: float, k: int, score: str, normalise: bool) -> None:
    ways = {"score": score, "normalise": normalise, "scale": 2.0}
    logits, bias = scores(seed), scores(seed + 1)[0, 0]
    choice = gates.top_k(logits, Experts(count=4, per_token=k, ffn=1, capacity_factor=factor, **ways), bias)
    agree(choice, [papers.top_k(rows, k, factor, bias.tolist(), **ways) for rows in logits.tolist()])


@few
@given(seeds, st.sampled_from([(2, 1, 2), (4, 2, 2), (4, 3, 1)]), st.sampled_from(["softmax", "sigmoid"]))
def test_top_k_within_groups(seed: int, of: tuple[int, int, int], score: str) -> None:
    groups, taken, k = of
    ways = {"score": score, "normalise": True, "scale": 2.0, "groups": groups, "groups_per_token": taken}
    logits, bias = scores(seed, count=8), scores(seed + 1, count=8)[0, 0]
    choice = gates.top_k(logits, Experts(count=8, per_token=k, ffn=1, **ways), bias)
    agree(choice, [papers.top_k(rows, k, 0.0, bias.tolist(), **ways) for rows in logits.tolist()])


@few
@given(seeds, factors)
def test_switch(seed: int, factor: float) -> None:
    logits = scores(seed)
    choice = gates.switch(logits, Experts(count=4, ffn=1, gate="switch", capacity_factor=factor))
    agree(choice, [papers.switch(rows, factor) for rows in logits.tolist()])


@few
@given(seeds, factors, st.booleans())
def test_gshard(seed: int, factor: float, chance: bool) -> None:
    logits = scores(seed)
    draws = torch.rand(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) if chance else None
    experts = Experts(count=4, per_token=2, ffn=1, gate="gshard", capacity_factor=factor)
    drawn = draws.tolist() if chance else [None] * 2
    agree(gates.gshard(logits, experts, draws), list(map(papers.gshard, logits.tolist(), [factor] * 2, drawn)))


@few
@given(seeds, factors, st.integers(1, 4), st.booleans())
def test_noisy_top_k(seed: int, factor: float, k: int, chance: bool) -> None:
    """Its smooth load is differentiable, and so is not defined where noisy logits are equal: here none are."""
    generator = torch.Generator().manual_seed(seed)
    clean, spread, draws = torch.randn(3, 2, 7, 4, generator=generator, dtype=torch.float64)
    spread, draws = spread.abs() + 0.5, draws if chance else None
    experts = Experts(count=4, per_token=k, ffn=1, gate="noisy-top-k", capacity_factor=factor)
    drawn = draws.tolist() if chance else [None] * 2
    agree(
        gates.noisy_top_k(clean, spread, experts, draws),
        list(map(papers.noisy_top_k, clean.tolist(), spread.tolist(), [k] * 2, [factor] * 2, drawn)),
    )


@few
@given(seeds, st.integers(1, 2), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_expert_choice(seed: int, k: int, factor: float) -> None:
    logits = scores(seed)
    experts = Experts(count=4, per_token=k, ffn=1, gate="expert-choice", capacity_factor=factor)
    agree(gates.expert_choice(logits, experts), [papers.expert_choice(rows, k, factor) for rows in logits.tolist()])


def test_of_tokens_that_differ_by_rounding_experts_take_the_earlier() -> None:
    experts = Experts(count=2, per_token=1, ffn=1, gate="expert-choice", capacity_factor=1.0)
    logits = torch.tensor([[[0.3, 0.1]] * 6], dtype=torch.float64)
    logits[0, 3:, 0] += 4e-16
    assert gates.expert_choice(logits, experts).chosen.all(-1).tolist() == [[True] * 3 + [False] * 3]


@few
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
