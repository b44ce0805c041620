"""The optimizer of flat runs, against torch's own on whole parameters."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import OptimizerConfig
from shoal.optim.build import STATES, FlatOptimizer

SHAPES = [(6, 5), (7,), (4, 3), (1,)]  # matrices decay, vectors do not


def flat_runs(weights, gradients, cuts):
    """Each parameter in pieces, as ZeRO's shards are."""
    for weight, gradient in zip(weights, gradients, strict=True):
        ends = [0, *sorted({min(c, weight.numel()) for c in cuts}), weight.numel()]
        for start, stop in pairwise(ends):
            yield weight.dim() > 1, weight.flatten()[start:stop], gradient.flatten()[start:stop]


def whole(name: str, weights, config: OptimizerConfig) -> torch.optim.Optimizer:
    groups = [{"params": [w for w in weights if w.dim() > 1], "weight_decay": config.weight_decay},
              {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, foreach=False)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, foreach=False)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(1, 30), max_size=4), seed=st.integers(0, 1000), decay=st.floats(0, 1))
def test_any_cut_updates_as_torch_does_on_whole_parameters(name, cuts, seed, decay):
    config = OptimizerConfig(name=name, learning_rate=0.1, betas=(0.8, 0.9), weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    expected = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    ours = [w.detach().clone() for w in expected]
    gradients = [torch.zeros_like(w) for w in ours]
    flat, reference = FlatOptimizer(config, flat_runs(ours, gradients, cuts)), whole(name, expected, config)
    for step in range(4):
        rate = 0.1 / (step + 1)
        for gradient, parameter in zip(gradients, expected, strict=True):
            gradient.copy_(draw(gradient.shape))
            parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = rate
        flat.step(rate)
        reference.step()
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_decay_moves_matrices_alone():
    weights = [torch.ones(2, 2), torch.ones(3)]
    gradients = [torch.zeros(2, 2), torch.zeros(3)]
    FlatOptimizer(OptimizerConfig(weight_decay=0.5), flat_runs(weights, gradients, [])).step(0.1)
    torch.testing.assert_close(weights[0], torch.full((2, 2), 0.95))
    assert torch.equal(weights[1], torch.ones(3))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_states_and_the_step_are_all_that_a_resumed_optimizer_needs(name):
    config = OptimizerConfig(name=name, learning_rate=0.1)
    weights, gradients = [torch.ones(4, 3)], [torch.randn(4, 3)]
    first = FlatOptimizer(config, flat_runs(weights, gradients, [5]))
    for _ in range(3):
        first.step(0.1)
    resumed_weights = [weights[0].clone()]
    resumed = FlatOptimizer(config, flat_runs(resumed_weights, gradients, [5]))
    for state in STATES[name]:
        for mine, theirs in zip(resumed.states()[state], first.states()[state], strict=True):
            mine.copy_(theirs)
    resumed.resume_at(3)
    first.step(0.05)
    resumed.step(0.05)
    assert torch.equal(weights[0], resumed_weights[0])


def test_bytes_are_those_of_the_states():
    weights, gradients = [torch.ones(8, 8)], [torch.zeros(8, 8)]
    for name, moments in (("adamw", 2), ("sgd", 0)):
        config = OptimizerConfig(name=name)
        assert FlatOptimizer(config, flat_runs(weights, gradients, [])).bytes() == moments * 64 * 4
