"""Stochastic rounding: right on average, exact where nothing is to be rounded, drawn from position and update alone."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.kernels.rounding import draw_bits, round_stochastically
from shoal.engine.models.initial import stream_key

MANY = torch.arange(1 << 16)


def rounded(x, key):
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_stochastically(out, x, draw_bits(key, torch.arange(x.numel()).view(x.shape)))
    return out


@settings(max_examples=30)
@given(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: abs(x) > 2.0**-100), st.integers(0, 1000))
def test_the_mean_is_the_number_and_neighbours_alone_occur(x, key):
    found = rounded(torch.full((1 << 14,), x), key).double()
    spacing = 2.0 ** (torch.frexp(torch.tensor(x, dtype=torch.float64)).exponent.item() - 8)
    below = math.floor(x / spacing) * spacing
    assert {*found.unique().tolist()} <= ({below} if below == x else {below, below + spacing})
    assert abs(found.mean().item() - x) < 5 * spacing * 0.5 / (1 << 7)  # five standard deviations of the mean


@settings(max_examples=50)
@given(st.integers(-(2**15), 2**15 - 1), st.integers(0, 1000))
def test_what_a_bfloat16_holds_stays(bits, key):
    x = torch.full((64,), bits, dtype=torch.int16).view(torch.bfloat16)
    if x.isfinite().all():
        assert torch.equal(rounded(x.float(), key), x)


def test_what_is_not_finite_stays_so():
    """NaN in all its bits: CUDA's has all of them set, and grows into those of a -0."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    x = bits.view(torch.float32).repeat(64)
    for key in range(8):
        torch.testing.assert_close(rounded(x, key).float(), x, rtol=0, atol=0, equal_nan=True)


def test_draws_are_even_and_differ_by_name_kind_update_and_seed():
    keys = [stream_key(seed, name) for seed, name in ((0, "a:w:1"), (0, "a:w:2"), (0, "a:m:1"), (0, "b:w:1"),
                                                      (1, "a:w:1"))]  # fmt: skip
    taken = torch.stack([draw_bits(key, MANY) & 0xFFFF for key in keys])
    assert len(set(keys)) == 5
    for bit in range(16):
        ones = (taken >> bit & 1).float()
        assert (ones.mean(1) - 0.5).abs().max() < 5 * 0.5 / 256  # of 65,536 draws
        together = torch.corrcoef(ones)
        assert (together - torch.eye(5)).abs().max() < 5 / 256
    for one in taken:  # neighbours have nothing to do with each other
        pair = torch.corrcoef(torch.stack((one[:-1], one[1:])).float())
        assert pair[0, 1].abs() < 5 / 256
