"""RMSNorm against torch's, forward and backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.engine.models.norm import RMSNorm


@given(rows=st.integers(1, 5), h=st.integers(1, 40), eps=st.sampled_from([None, 1e-5]), seed=st.integers(0, 99))
def test_it_computes_what_torch_computes(rows, h, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(2, rows, h, dtype=torch.float64, generator=generator) for _ in range(2))
    results = []
    for kind in (RMSNorm, nn.RMSNorm):
        norm, at = kind(h, eps=eps, dtype=torch.float64), x.clone().requires_grad_()
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, h))
        y = norm(at)
        y.backward(dy)
        results.append((y, at.grad, norm.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_row_of_zeros_has_finite_gradients():
    norm, x = RMSNorm(8, eps=1e-6), torch.zeros(1, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all() and norm.weight.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_are_left_to_torch(dtype):
    ours, theirs = RMSNorm(16, dtype=dtype), nn.RMSNorm(16, dtype=dtype)
    x = torch.randn(3, 16).to(dtype)
    assert torch.equal(ours(x), theirs(x))
