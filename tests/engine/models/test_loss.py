"""The loss in the memory of its logits, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine.models.loss import IGNORE, CrossEntropy


def drawn(b: int, s: int, v: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Logits and targets, of which every third does not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(b, s, v, dtype=torch.float64, generator=generator)
    targets = torch.randint(v, (b, s), generator=generator)
    targets.view(-1)[::3] = IGNORE
    return logits.to(dtype), targets


def of_torch(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def both(logits, targets, scale=1.0):
    """(loss, gradient of the logits) of shoal's and of torch's, in float64."""
    for function in (CrossEntropy(), of_torch):
        at = logits.clone().requires_grad_()
        x = at.clone() if function is not of_torch else at.double()
        loss = function(x, targets)
        (scale * loss).backward()
        yield loss.detach().double(), at.grad.double()


@given(b=st.integers(1, 3), s=st.integers(1, 7), v=st.integers(1, 60), seed=st.integers(0, 99), scale=st.floats(-3, 3))
def test_it_computes_what_torch_computes(b, s, v, seed, scale):
    for ours, theirs in zip(*both(*drawn(b, s, v, seed), scale), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_short_formats_are_summed_in_float32(dtype, near):
    (ours, gradient), (theirs, expected) = both(*drawn(2, 9, 50, dtype=dtype))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradient, expected, rtol=near, atol=1e-8)


def test_logits_far_apart_overflow_nothing():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    (ours, gradient), (theirs, expected) = both(logits, torch.tensor([[1]]))
    assert ours == theirs == 2e4
    assert torch.equal(gradient, expected)


def test_nothing_of_the_logits_size_is_made():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != memory:
                self.numel = max(self.numel, out.untyped_storage().nbytes() // 4)
            return out

    logits, targets = drawn(2, 5, 70, dtype=torch.float32)
    memory = logits.untyped_storage().data_ptr()
    logits.requires_grad_()
    with Largest() as largest:
        loss = CrossEntropy()(logits, targets)
        gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient.untyped_storage().data_ptr() == memory
    assert largest.numel <= 4 * targets.numel()  # a few numbers a token


def test_a_second_backward_is_refused_as_it_would_be_wrong():
    logits, targets = drawn(1, 4, 8)
    loss = CrossEntropy()(logits.requires_grad_().clone(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_id_beyond_the_vocabulary_is_refused():
    logits, targets = drawn(1, 4, 8)
    targets[0, 1] = 8
    with pytest.raises(RuntimeError, match="out of bounds"):
        CrossEntropy()(logits, targets)


def test_compiled_it_is_torchs():
    logits, targets = drawn(2, 5, 9, dtype=torch.float32)
    kept = logits.clone()
    compiled = torch.compile(CrossEntropy(), backend="aot_eager")
    torch.testing.assert_close(compiled(logits, targets), of_torch(kept, targets))
    assert torch.equal(logits, kept)
