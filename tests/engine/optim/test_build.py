"""The rules by name: decay, factors on the rate, states, on any cut of the parameters."""

import shutil
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.boxes import flat_range
from shoal.engine.optim.build import COMPILED, RULES, build, rate_factor, weight_decay
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.optim.sophia import Sophia
from shoal.spec.config import OptimizerConfig
from shoal.spec.optimizers import READ_BY

SHAPES = {
    "layers.0.mlp.up.weight": (6, 5), "norm.weight": (7,), "layers.0.mlp.down.weight": (4, 3), "bias": (1,),
    "layers.1.mlp.up.weight": (20, 300), "embed": (9000,),  # in 8 bits, in blocks that a cut may divide
    "layers.1.mlp.experts.up": (3, 4, 5),
}


def cut_shards(weights, gradients, cuts, config):
    """Each parameter in pieces, as ZeRO's shards are, all on one rank."""
    shards = []
    for (name, whole), weight, gradient in zip(SHAPES.items(), weights, gradients, strict=True):
        ends = [0, *sorted({min(c, weight.numel()) for c in cuts}), weight.numel()]
        for start, stop in pairwise(ends):
            parts = tuple(ShardPart(name, whole, box, at) for at, box in flat_range(whole, start, stop))
            flat = weight.flatten()[start:stop], gradient.flatten()[start:stop]
            shards.append(Shard(*flat, parts, weight_decay(config, name, whole), rate_factor(config, name)))
    return Shards(SHAPES, shards, weights[0].dtype, saves=frozenset(SHAPES))


def whole(weights, gradients, config, names=tuple(SHAPES)):
    return Shards.from_parameters(
        zip(names, weights, gradients, strict=True),
        lambda name, tensor: weight_decay(config, name, tuple(tensor.shape)),
    )


def update(rule, rate):
    """One update; Sophia's with estimates of the Hessian that any cut has alike."""
    if isinstance(rule, Sophia) and rule.due:
        rule.learn([shard.gradient.square() * 3 for shard in rule.shards.shards])
    rule.step(rate)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", [name for name in sorted(COMPILED) if name != "sophia-h"])
def test_compiled_rules_make_the_same_updates_and_are_compiled_once(name, monkeypatch):
    """Captured and made functional; but of one rule alone made into C++, which takes most of the time."""
    if name == "sage":  # it has one program; compiling headers first takes longer than compiling the program
        monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    else:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = OptimizerConfig(name=name, betas=(0.8, 0.9))
    generator = torch.Generator().manual_seed(0)
    names = tuple(SHAPES)[:2]  # a matrix and a vector: the compiler takes seconds for each
    weights, gradients = (
        [torch.randn(SHAPES[name], dtype=torch.float64, generator=generator) for name in names] for _ in range(2)
    )
    ours, expected = ([w.clone() for w in weights] for _ in range(2))
    rules = [build(config, whole(ours, gradients, config, names), compile=True)]
    rules.append(build(config, whole(expected, gradients, config, names)))
    for step in range(3):
        # What changes from update to update must not have it compiled anew in each.
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            for rule in rules:
                update(rule, 0.1 / (step + 1))
        for gradient in gradients:
            gradient.mul_(-1.5)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(RULES))
@settings(deadline=None, max_examples=10)
@given(
    cuts=st.lists(st.integers(1, 30) | st.integers(1, 9000), max_size=4), seed=st.integers(0, 1000),
    decay=st.floats(0, 1),
)
def test_any_cut_updates_as_whole_parameters_do(name, cuts, seed, decay):
    config = OptimizerConfig(name=name, learning_rate=0.1, betas=(0.8, 0.9), weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    expected = [draw(shape) for shape in SHAPES.values()]
    ours = [w.clone() for w in expected]
    gradients, others = ([torch.zeros_like(w) for w in ours] for _ in range(2))
    rule = build(config, cut_shards(ours, gradients, cuts, config))
    reference = build(config, whole(expected, others, config))
    for step in range(4):
        for gradient, other in zip(gradients, others, strict=True):
            gradient.copy_(draw(gradient.shape))
            other.copy_(gradient)
        update(rule, 0.1 / (step + 1))
        update(reference, 0.1 / (step + 1))
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(RULES))
def test_decay_moves_matrices_alone(name):
    config = OptimizerConfig(name=name, weight_decay=0.5)
    weights = [torch.ones(shape) for shape in SHAPES.values()]
    gradients = [torch.zeros_like(w) for w in weights]
    update(build(config, whole(weights, gradients, config)), 0.1)
    for weight in weights:
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        elif name not in ("adam", "adagrad", "adafactor"):  # which have decay in the gradient, or in its scale
            torch.testing.assert_close(weight, torch.full_like(weight, 0.95))
        else:
            assert (weight < 1).all()


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("updates", [1, 3, 6])
def test_the_states_and_the_step_are_all_that_a_resumed_optimizer_needs(name, updates):
    config = OptimizerConfig(name=name, learning_rate=0.1, hessian_every=3)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    values = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    gradients = [value.clone() for value in values]
    first = build(config, whole(weights, gradients, config))

    def step(rule, rate):
        for gradient, value in zip(gradients, values, strict=True):
            gradient.copy_(value)
        update(rule, rate)

    for _ in range(updates):
        step(first, 0.1)
    resumed_weights = [w.clone() for w in weights]
    resumed = build(config, whole(resumed_weights, gradients, config))
    for kind, parameters in resumed.states().items():
        for parameter, pieces in parameters.items():
            for mine, theirs in zip(pieces, first.states()[kind][parameter], strict=True):
                mine.tensor.copy_(theirs.tensor)
    resumed.resume_at(updates)
    for _ in range(2):
        saved = [w.clone() for w in weights]
        step(first, 0.05)
        expected = [w.clone() for w in weights]
        step(resumed, 0.05)
        assert not any(torch.equal(w, s) for w, s in zip(weights, saved, strict=True))
        assert all(torch.equal(w, r) for w, r in zip(expected, resumed_weights, strict=True))


OTHERS = {
    "betas": (0.5, 0.6), "eps": 0.5, "momentum": 0.5, "nesterov": True, "sensitivity_beta": 0.5, "hessian_every": 2,
    "hessian_scale": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("setting", sorted(READ_BY.keys() - {"from_weights"}))  # says where moments begin
def test_a_setting_changes_what_the_rules_do_that_read_it_and_no_other(setting):
    changed = set()
    for name in RULES:
        ends = []
        for settings_of in ({}, {setting: OTHERS[setting]}):
            config, generator = OptimizerConfig(name=name, **settings_of), torch.Generator().manual_seed(5)
            weights, gradients = (
                [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES.values()]
                for _ in range(2)
            )
            rule = build(config, whole(weights, gradients, config))
            for _ in range(6):
                update(rule, 0.01)
                for gradient in gradients:
                    gradient.mul_(-1.1)
            ends.append(torch.cat([w.flatten() for w in weights]))
        if not torch.equal(*ends):
            changed.add(name)
    assert changed == set(READ_BY[setting])


def test_sophia_refuses_to_go_on_without_an_estimate():
    config = OptimizerConfig(name="sophia-h", hessian_every=2)
    weights = [torch.ones(shape) for shape in SHAPES.values()]
    rule = build(config, whole(weights, [torch.ones_like(w) for w in weights], config))
    with pytest.raises(RuntimeError, match="update 0 of Sophia"):
        rule.step(0.1)
    update(rule, 0.1)
    rule.step(0.1)
    with pytest.raises(RuntimeError, match="update 2 of Sophia"):
        rule.step(0.1)


def test_rates_multiply_the_learning_rate_of_the_parameters_that_match_first():
    config = OptimizerConfig(name="sgd", weight_decay=0.0, lr_factors={"norm*": 0.5, "n*": 7.0})
    weights = [torch.zeros(shape) for shape in SHAPES.values()]
    gradients = [torch.ones_like(w) for w in weights]
    build(config, cut_shards(weights, gradients, [2], config)).step(1.0)
    assert [w.flatten()[0].item() for w in weights] == [-1.0, -0.5, -1.0, -1.0, -1.0, -1.0, -1.0]


def test_bytes_are_those_of_the_states():
    big = {"layers.0.mlp.up.weight": (64, 512)}
    sizes = {"adamw": 8, "sgd": 0, "momentum": 4, "sage": 12, "sophia-g": 8, "muon": 4, "adam8bit": 2 + 8 / 256}
    for name, size in sizes.items():
        config = OptimizerConfig(name=name)
        weights, gradients = torch.ones(64, 512), torch.zeros(64, 512)
        shards = Shards.from_parameters([(*big, weights, gradients)], lambda name, tensor: 0.0)
        assert build(config, shards).bytes() == size * 64 * 512
    factored = Shards.from_parameters([(*big, torch.ones(64, 512), torch.zeros(64, 512))], lambda name, tensor: 0.0)
    assert build(OptimizerConfig(name="adafactor"), factored).bytes() == 4 * (64 + 512)
    three = ("experts", torch.ones(3, 64, 512), torch.zeros(3, 64, 512))
    experts = Shards.from_parameters([three], lambda name, tensor: 0.0)
    rule = build(OptimizerConfig(name="adafactor"), experts)
    assert rule.bytes() == 4 * 3 * (64 + 512)
    assert {kind: pieces["experts"][0].global_shape for kind, pieces in rule.states().items() if pieces} == {
        "row": (3, 64), "column": (3, 512),
    }


@pytest.mark.parametrize("nesterov", [True, False])
def test_no_momentum_is_gradient_descent(nesterov):
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in SHAPES.values()]
    gradients = [w.cos() for w in weights]
    made = []
    for config in (OptimizerConfig(name="sgd"), OptimizerConfig(name="momentum", momentum=0.0, nesterov=nesterov)):
        mine = [w.clone() for w in weights]
        rule = build(config, whole(mine, gradients, config))
        for _ in range(3):
            rule.step(0.1)
        made.append(mine)
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_sophia_taken_back_asks_for_the_estimate_again():
    """As in a roll-back, which overwrites the states of a rule that went further."""
    config = OptimizerConfig(name="sophia-g", hessian_every=3)
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in SHAPES.values()]
    rule = build(config, whole(weights, [w.cos() for w in weights], config))
    for _ in range(5):
        update(rule, 0.1)
    rule.resume_at(3)
    assert rule.due
