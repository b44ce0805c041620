"""Bins and shares against counting by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.precision.histogram import BINS, count, find_bin, limits, shares, to_octave
from shoal.spec.number_formats import BF16, E4M3, E5M2, FP16


@given(st.floats(2.0**-126, 2.0**127, width=32), st.booleans())
def test_a_number_is_in_its_quarter_of_an_octave(x, minus):
    counts = count(torch.tensor([-x if minus else x]))
    i = int(counts.argmax())
    fraction, exponent = math.frexp(x)
    assert counts.sum() == 1 and i == find_bin(x)
    assert to_octave(i) == exponent - 1
    assert (i % 4) / 4 <= 2 * fraction - 1 < (i % 4 + 1) / 4


def test_zeros_and_what_is_not_finite():
    counts = count(torch.tensor([0.0, -0.0, math.inf, math.nan]))
    assert counts[0] == 2 and counts[BINS - 4 :].sum() == 2


@pytest.mark.parametrize("kind", [FP16, E4M3, E5M2, BF16], ids=lambda kind: kind.name)
@given(seed=st.integers(0, 50))
def test_shares_are_what_the_format_itself_loses(kind, seed):
    """Against torch's own conversion, for numbers that are not at the very border."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-60, 60, (4000,), generator=generator).float()
    x = torch.randn(4000, generator=generator).sign() * 2.0**octaves * (1 + 0.25 * torch.randint(0, 4, (4000,)) + 0.1)
    low, high = limits(kind)
    below, above = shares(count(x).tolist(), kind)
    rounded = x.to(getattr(torch, kind.name)).double()
    assert below == pytest.approx((rounded == 0).double().mean().item(), abs=1e-12)
    assert above == pytest.approx((x.abs().double() > kind.largest).double().mean().item(), abs=1e-12)
    assert 0 < low < high < BINS - 4


def test_a_scale_takes_the_largest_into_the_last_octave():
    x = torch.tensor([2.0**-30, 2.0**-29, 2.0**-50])
    assert shares(count(x).tolist(), E4M3) == (1.0, 0.0)
    assert shares(count(x).tolist(), E4M3, scaled=True) == (pytest.approx(1 / 3), 0.0)
    assert shares(count(torch.zeros(3)).tolist(), E4M3) == (0.0, 0.0)
    assert shares(count(torch.tensor([math.inf, 1.0])).tolist(), FP16, scaled=True) == (0.0, 0.5)
