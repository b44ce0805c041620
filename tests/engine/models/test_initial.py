"""Initial values depend on (seed, name, index) alone."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.base.boxes import Box
from shoal.engine.models import initial as module
from shoal.engine.models.initial import Initial, fill, on_meta
from shoal.engine.models.transformer import Transformer, initial
from shoal.spec.catalog import model_shape

NORMAL = Initial(0.5, 0.02)


def values(whole: tuple[int, ...], box: Box | None = None, *, name: str = "w", seed: int = 0, start=NORMAL):
    box = box or Box.full(whole)
    out = torch.empty(box.shape, dtype=torch.float64)
    fill(out, name=name, global_shape=whole, box=box, initial=start, seed=seed)
    return out


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    whole = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, n - 1)) for n in whole)
    return whole, Box(start, tuple(draw(st.integers(1, n - o)) for n, o in zip(whole, start, strict=True)))


@settings(max_examples=80, deadline=None)
@given(boxes(), st.integers(0, 2**63 - 1))
def test_any_box_is_that_box_of_the_whole(case: tuple[tuple[int, ...], Box], seed: int) -> None:
    whole, box = case
    assert torch.equal(values(whole, box, seed=seed), values(whole, seed=seed)[box.slices])


def test_large_shards_are_filled_in_blocks_of_the_same_values(monkeypatch) -> None:
    expected = values((50, 7))
    monkeypatch.setattr(module, "_BLOCK", 21)
    assert torch.equal(values((50, 7)), expected)


def test_a_normal_distribution() -> None:
    x = values((1000, 1000), start=Initial(0.0, 1.0)).flatten()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)  # kurtosis
    ordered = x.sort().values  # Kolmogorov-Smirnov
    distance = (torch.special.ndtr(ordered) - torch.arange(n, dtype=torch.float64) / n).abs().max()
    assert distance < 2 / math.sqrt(n)


def test_names_seeds_and_neighbours_are_independent() -> None:
    n = 100_000
    first = values((n,), start=Initial(0, 1))
    others = [
        values((n,), name="v", start=Initial(0, 1)),
        values((n,), seed=1, start=Initial(0, 1)),
        first.roll(1),
    ]
    for other in others:
        assert abs((first * other).mean()) < 5 / math.sqrt(n)


def test_every_parameter_of_a_family_starts_as_its_paper_says() -> None:
    for name in ("tiny", "tiny-gpt"):
        shape = model_shape(name)
        with on_meta():
            model = Transformer(shape)
        for parameter, p in model.named_parameters():
            start = initial(parameter, shape)
            if parameter.endswith("bias"):
                assert start == Initial(0, 0)
            elif p.dim() == 1:
                assert start == Initial(1, 0)
            elif parameter.endswith(("out.weight", "down.weight")):
                assert start == Initial(0, 0.02 / math.sqrt(2 * shape.layers))
            else:
                assert start == Initial(0, 0.02)


def test_on_meta_nothing_is_filled_and_some_layers_are_built_alone() -> None:
    calls: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    shape = model_shape("tiny")
    with Calls(), on_meta():
        part = Transformer(shape, layers=(1, 3))
    assert "empty" in calls and "uniform_" not in calls
    whole = dict(Transformer(shape).named_parameters())
    expected = {name: p.shape for name, p in whole.items() if not name.startswith(("layers.0.", "layers.2."))}
    assert {name: p.shape for name, p in part.named_parameters()} == expected
    assert all(p.is_meta for p in part.parameters())
