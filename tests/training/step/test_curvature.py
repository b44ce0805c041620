"""Sophia's estimates: labels as the model would draw_labels them, products with the Hessian as autograd has them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.base.boxes import Box
from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Dataset, MixtureDataset, SyntheticDataset
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import ELSEWHERE, draw_labels, label_key
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer, initialise
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.spec.config import MixtureSource, build_config
from shoal.spec.layout import Layout
from shoal.training.check import check
from shoal.training.dry_run.tracker import Tracker
from shoal.training.resilience.reexecute import trace
from shoal.training.step import curvature
from shoal.training.step.curvature import estimate
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_any_split_of_the_ids_draws_the_same_labels(vocab, parts, seed):
    logits = 3 * torch.randn(2, 5, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    index = torch.arange(10).view(2, 5) + 7 * seed
    whole = draw_labels(logits, seed, index)
    assert ((whole >= 0) & (whole < vocab)).all()
    rows = -(-vocab // parts)
    pieces = [logits[..., rows * p : rows * (p + 1)] for p in range(parts)]
    sums = torch.stack([torch.logsumexp(piece, -1) for piece in pieces])
    drawn = [
        draw_labels(piece, seed, index, start=rows * p, part=p, gather=lambda x: sums) for p, piece in enumerate(pieces)
    ]
    assert (sum((labels != ELSEWHERE).int() for labels in drawn) == 1).all()
    assert torch.equal(torch.stack(drawn).amax(0), whole)


def test_labels_come_as_often_as_the_model_says():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -30.0])
    labels = draw_labels(logits.expand(1, 200_000, 5), label_key(3, 4), torch.arange(200_000)[None])
    found = torch.bincount(labels.flatten(), minlength=5) / 200_000
    torch.testing.assert_close(found, logits.softmax(0), rtol=0, atol=4e-3)  # 4 standard deviations at most


def engine_of(rule: str, samples: Dataset | None = None) -> tuple[Engine, Transformer]:
    """An engine in float64, and a plain model of the same weights."""
    model = {"name": "tiny-gpt", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 12}
    config = build_config({
        "model": model, "parallel": {"micro_batch": 2}, "data": {"source": "synthetic", "sequence_length": 8},
        "train": {"global_batch": 8, "precision": "fp64"}, "optimizer": {"name": rule},
    })
    shape = check(config)
    plain = Transformer(shape).double()
    initialise(plain, config.train.seed)
    return Engine(config, shape, Mesh(config.parallel, 0), samples or SyntheticDataset(shape.vocab, 8, 0)), plain


def by_name(engine: Engine, tensors) -> dict[str, torch.Tensor]:
    shards = zip(engine.optimizer.shards.shards, tensors, strict=True)
    return {part.name: part.piece(tensor).tensor for shard, tensor in shards for part in shard.parts}


def test_hutchinson_is_the_product_with_the_hessian_as_autograd_has_it():
    engine, model = engine_of("sophia-h")
    batches = engine.get_batches(0)
    tokens = sum(batch.unmasked() for batch in batches)
    before = {name: pieces[0].tensor.clone() for name, pieces in engine.parameters.weights().items()}
    found = by_name(engine, estimate(engine, 0, batches, tokens))
    assert all(torch.equal(before[name], p[0].tensor) for name, p in engine.parameters.weights().items())
    parameters = dict(model.named_parameters())
    u = {name: torch.empty_like(p) for name, p in parameters.items()}
    for name, direction in u.items():
        whole = tuple(direction.shape)
        box, normal = Box.full(whole), Initial(0.0, 1.0)
        fill(direction, name=f"hutchinson.0.{name}", global_shape=whole, box=box, initial=normal, seed=0)
    with sdpa_kernel(SDPBackend.MATH):  # which has a second derivative, as torch's loss has
        loss = sum(
            F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), reduction="sum")
            for batch in batches
        ) / tokens  # fmt: skip
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        along = sum((g * direction).sum() for g, direction in zip(gradients, u.values(), strict=True))
        products = dict(zip(parameters, torch.autograd.grad(along, list(parameters.values())), strict=True))
    wrong = sum((found[name] - u[name] * products[name]).square().sum() for name in found)
    size = sum((u[name] * products[name]).square().sum() for name in found)
    assert (wrong / size).sqrt() < 2e-4


def test_gauss_newton_bartlett_is_the_squared_gradient_for_drawn_labels():
    engine, model = engine_of("sophia-g")
    batches = engine.get_batches(2)
    tokens = sum(batch.unmasked() for batch in batches)
    found = by_name(engine, estimate(engine, 2, batches, tokens))
    for m, batch in enumerate(batches):
        index = (2 * 8 + m * 2 + torch.arange(2))[:, None] * 8 + torch.arange(8)
        labels = draw_labels(model(batch.tokens), label_key(0, 2), index)
        labels[batch.targets == IGNORE] = IGNORE
        (model(batch.tokens, labels) / tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], tokens * parameter.grad**2, rtol=1e-8, atol=1e-18)


@pytest.mark.parametrize(("rule", "numbers"), [("sophia-g", [0]), ("sophia-h", [1, 2])])
def test_what_is_alive_besides_when_a_backward_of_an_estimate_begins(rule, numbers, monkeypatch):
    """For each weight so many numbers; the cost model has the most of them."""
    engine, _ = engine_of(rule)
    batches = engine.get_batches(0)
    tokens = sum(batch.unmasked() for batch in batches)
    size = sum(shard.weights.numel() * shard.weights.element_size() for shard in engine.optimizer.shards.shards)
    with Tracker() as tracker:
        estimate(engine, 0, batches, tokens)
        before, seen, backward = tracker.alive, [], curvature._backward  # by now all that stays was seen

        def watched(*args):
            seen.append(tracker.alive - before)
            backward(*args)

        monkeypatch.setattr(curvature, "_backward", watched)
        estimate(engine, 0, batches, tokens)
    assert seen == pytest.approx([n * size for n in numbers], abs=0.05 * size)
    whole = [StagePart(range(engine.shape.layers))]
    said = state_bytes(engine.shape, Layout(), engine.policy.formats, rule, whole).estimating
    assert said == pytest.approx(max(seen), abs=0.05 * size)


def mixture() -> MixtureDataset:
    return MixtureDataset(
        {name: SyntheticDataset(259, 8, seed) for seed, name in enumerate(("web", "code"))},
        {name: MixtureSource() for name in ("web", "code")}, seed=0, sequence_length=8,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["sophia-g", "sophia-h"])
def test_passes_of_an_estimate_count_for_no_source(rule):
    """Such a pass has sampled labels or other weights, so its loss is not one of the training."""
    engine, _ = engine_of(rule, mixture())
    batches = engine.get_batches(0)
    tokens = sum(batch.unmasked() for batch in batches)
    engine.step(0, dry=True)
    expected = engine.source_losses.take()
    assert set(expected) == {"web", "code"}
    estimate(engine, 0, batches, tokens)
    assert engine.source_losses.take() == {}
    engine.step(0, dry=True)
    assert engine.source_losses.take() == pytest.approx(expected)


def test_reruns_of_a_step_and_steps_rolled_back_count_for_no_source():
    engine, _ = engine_of("sgd", mixture())
    engine.step(0, dry=True)
    trace(engine, 1)  # computes a step that training runs as well
    once = engine.source_losses.take()
    engine.step(0, dry=True)
    assert set(once) == {"web", "code"} and engine.source_losses.take() == once
    engine.step(1, dry=True)
    engine.restored(updates=0)
    engine.step(0, dry=True)
    assert engine.source_losses.take() == once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"dp": 2, "sync": "topk"}}, "parallel.sync = 'topk'"),
        ({"parallel": {"pp": 2, "schedule": "pipedream"}, "optimizer": {"clip_norm": 0}}, "one version of all weights"),
        ({"train": {"precision": "bf16"}}, "rounding would dominate its differences of gradients"),
    ],
)
def test_what_no_estimate_can_be_made_of_is_refused(changes, message):
    values = {"optimizer": {"name": "sophia-h"}}
    for section, fields in changes.items():
        values[section] = values.get(section, {}) | fields
    with pytest.raises(UsageError, match=message):
        check(build_config(values))


def test_an_estimate_that_is_not_finite_is_not_learned(monkeypatch):
    engine, _ = engine_of("sophia-g")
    make = curvature.gauss_newton_bartlett

    def spoilt(*arguments):
        first, *others = make(*arguments)
        first[-1] = torch.nan
        return [first, *others]

    monkeypatch.setattr(curvature, "gauss_newton_bartlett", spoilt)
    before = {name: pieces[0].tensor.clone() for name, pieces in engine.state().items()}
    with pytest.raises(NonFinite, match="step 0: Sophia's estimate of the Hessian is not finite") as raised:
        engine.step(0)
    assert raised.value.untouched
    assert all(torch.equal(before[name], pieces[0].tensor) for name, pieces in engine.state().items())
