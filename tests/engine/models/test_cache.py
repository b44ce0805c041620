"""A sequence computed a slice at a time is the sequence computed whole, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.models.cache import Slice
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import ModelShape
from tests.engine.models.test_transformer import SHAPES, random_model

LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= 9)


def in_slices(model: Transformer, lengths: list[int], tokens: Tensor, targets: Tensor, documents: Tensor | None):
    """Forward and backward slice by slice; the summed loss."""
    part, start, flights, total = None, 0, [], 0.0
    for length in lengths:
        part, stop = Slice(part), start + length
        seen = None if documents is None else documents[:, :stop]
        loss = model(tokens[:, start:stop], targets[:, start:stop], seen, part=part)
        flights.append((loss, part))
        total, start = total + loss.item(), stop
    for loss, part in reversed(flights):
        torch.autograd.backward([loss, *part.roots()], [None, *part.root_gradients()])
    return total


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES.values())), lengths=LENGTHS, packed=st.booleans(),
    kernel=st.sampled_from(("sdpa", "explicit")), recompute=st.sampled_from(("none", "selective", "full")),
)
def test_slices_are_the_whole_sequence(
    shape: ModelShape, lengths: list[int], packed: bool, kernel: str, recompute: str
) -> None:
    s = sum(lengths)
    models = [random_model(shape, kernel=kernel), random_model(shape, kernel=kernel, recompute=recompute)]
    tokens, targets = torch.randint(0, shape.vocab, (2, 2, s))
    targets[torch.rand(2, s) < 0.3] = IGNORE
    documents = torch.randint(0, 2, (2, s)).cumsum(1) if packed else None
    loss = models[0](tokens, targets, documents)
    loss.backward()
    assert in_slices(models[1], lengths, tokens, targets, documents) == pytest.approx(loss.item(), rel=1e-12)
    for (name, expected), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: n + text)


@torch.no_grad()
def test_a_slice_keeps_the_keys_and_values_of_all_before_it() -> None:
    model = random_model(SHAPES["llama"])
    first = Slice()
    model(torch.randint(0, 11, (2, 4)), part=first)
    second = Slice(first)
    model(torch.randint(0, 11, (2, 3)), part=second)
    assert (first.start, first.stop, second.start, second.stop) == (0, 4, 4, 7)
    for layer in model.layers.values():
        assert first.past == {}
        assert [x.shape for x in second.past[layer.attention]] == [(2, 2, 4, 6)] * 2
    assert [x.shape for x in first.roots()] == [(2, 2, 4, 6)] * 4
    assert second.roots() == second.root_gradients() == []
