"""Element-wise rules on narrow formats: any cut of the parameters is updated alike, to the bit."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.boxes import Box, flat_range
from shoal.engine.optim import low_precision_state
from shoal.engine.optim.build import RULES, build, build_for
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.optim.sophia import Sophia
from shoal.engine.precision.policy import POLICIES
from shoal.spec.config import OptimizerConfig
from shoal.spec.optimizers import ELEMENTWISE

SHAPES = {"layers.0.mlp.up.weight": (7, 9), "norm.weight": (5,), "head.weight": (3, 11)}
LARGE = {"layers.0.mlp.up.weight": (15, 300), "norm.weight": (31,)}  # 8-bit Adam's, of which it quantises one


def cut(values, dtype, reduce, cuts, shapes=SHAPES):
    """The parameters end to end, cut in shards at some places."""
    total = sum(math.prod(shape) for shape in shapes.values())
    weights, gradients = values[0].to(dtype, copy=True), torch.zeros(total, dtype=reduce)
    edges, shards = sorted({0, total, *cuts}), []
    for start, stop in pairwise(edges):
        parts, begin = [], 0
        for name, shape in shapes.items():
            end = begin + math.prod(shape)
            for offset, box in flat_range(shape, max(start, begin) - begin, min(stop, end) - begin):
                parts.append(ShardPart(name, shape, box, max(start, begin) - start + offset))
            begin = end
        shards.append(Shard(weights[start:stop], gradients[start:stop], tuple(parts), decay=0.1))
    return Shards(shapes, shards, dtype), weights, gradients


@settings(max_examples=20)
@given(st.data())
def test_any_cut_rounds_as_the_whole_does(data):
    name = data.draw(st.sampled_from(sorted(ELEMENTWISE)))
    precision = data.draw(st.sampled_from(["bf16-weights", "bf16-all", "bf16-sums", "bf16-moments"]))
    cuts = data.draw(st.lists(st.integers(1, 100), max_size=4))
    values = torch.randn(2, 101, generator=torch.Generator().manual_seed(1))
    policy, results = POLICIES[precision], []
    size = low_precision_state._BLOCK["cpu"]
    low_precision_state._BLOCK["cpu"] = data.draw(st.sampled_from([16, 1 << 16]))
    try:
        for where in ([], cuts):
            shards, weights, gradients = cut(values, policy.storage, policy.reduce, where)
            rule = build_for(policy, OptimizerConfig(name=name), shards, seed=3)
            for step in range(3):
                gradients.copy_(values[1] * (step + 1))
                rule.step(0.01)
            states = {kind: sum(p.tensor.double().sum().item() for pieces in of.values() for p in pieces)
                      for kind, of in rule.states().items()}
            results.append((weights, states))
            assert all(p.tensor.dtype == policy.state for of in rule.states().values()
                       for pieces in of.values() for p in pieces)
    finally:
        low_precision_state._BLOCK["cpu"] = size
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for kind, total in results[0][1].items():
        assert results[1][1][kind] == pytest.approx(total, rel=1e-12, abs=1e-12)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4530), max_size=4))
def test_any_cut_rounds_the_weights_of_8_bit_adam_alike(cuts):
    values = torch.randn(2, 4531, generator=torch.Generator().manual_seed(1))
    policy, results = POLICIES["bf16-weights"], []
    for where in ([], cuts):
        shards, weights, gradients = cut(values, policy.storage, policy.reduce, where, LARGE)
        rule = build_for(policy, OptimizerConfig(name="adam8bit"), shards, seed=3)
        for step in range(3):
            gradients.copy_(values[1] * (step + 1))
            rule.step(0.01)
        results.append(weights)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_in_float32_it_is_the_rule_itself(name):
    values = torch.randn(2, 101)
    results = []
    for wide in (False, True):
        shards, weights, gradients = cut(values, torch.float32, torch.float32, [40])
        config = OptimizerConfig(name=name)
        rule = build(config, shards)
        if wide:
            rule = low_precision_state.Float32Rule(config, shards, build, state=torch.float32, seed=0)
        for _ in range(3):
            gradients.copy_(values[1])
            rule.step(0.01)
        results.append(weights)
    # Not to the bit: a vectorised kernel rounds the last few elements of a block in another way.
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(RULES) - set(ELEMENTWISE)))
def test_other_rules_take_the_digits_that_a_narrow_gradient_has(name):
    values, results = torch.randn(4, 4531, generator=torch.Generator().manual_seed(2)), []
    for precision in ("bf16", "bf16-sums"):
        policy = POLICIES[precision]
        shards, weights, gradients = cut(values, policy.storage, policy.reduce, [], LARGE)
        rule = build_for(policy, OptimizerConfig(name=name, hessian_every=2), shards, seed=0)
        for step in range(3):
            gradients.copy_(values[1 + step].bfloat16())
            if isinstance(rule, Sophia) and rule.due:
                rule.learn([shard.gradient.float().square() for shard in shards.shards])
            rule.step(0.01)
        results.append(weights)
        assert all(p.tensor.dtype in (torch.float32, torch.uint8) for of in rule.states().values()
                   for pieces in of.values() for p in pieces)
    # Not to the bit, as above.
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("precision", "name"), [("bf16-weights", "sgd"), ("bf16-all", "sgd"),
                                                 ("bf16-weights", "adam8bit")])
def test_updates_below_half_a_digit_add_up(precision, name):
    """1 + 64 x 2^-12 is 1 + 2^-6, of which rounding to the nearest would see nothing.

    Below 0, where the gradient is 1: 8-bit Adam has a code of that, and none of -1.
    """
    policy, n = POLICIES[precision], 4096
    weights, gradient = -torch.ones(n, dtype=policy.storage), torch.ones(n, dtype=policy.reduce)
    shard = Shard(weights, gradient, (ShardPart("w", (n,), Box.full((n,)), 0),))
    rule = build_for(policy, OptimizerConfig(name=name), Shards({"w": (n,)}, [shard], policy.storage), seed=0)
    assert torch.equal((weights.float() - 2.0**-12).to(policy.storage), weights)
    for _ in range(64):
        rule.step(2.0**-12)
    assert -weights.double().mean().item() == pytest.approx(1 + 2.0**-6, abs=5e-4)
