"""NVFP4 against a plain reference, number by number: codes, two levels of scales, rotation, and drawn rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.precision.float8 import Grain, compute_scale, encode, largest
from shoal.engine.precision.nvfp4 import RoundingDraws, draw_rounding, rotate
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, Recipe
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E2M1, E4M3
from tests.engine.precision.quantise import quantise

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of codes 0 to 7 (OCP MX, table 5)
E4M3_NUMBERS = [i * 2.0**-9 for i in range(8)] + [
    (1 + i / 8) * 2.0**e for e in range(-6, 9) for i in range(8) if (1 + i / 8) * 2.0**e <= 448
]
ROW = Grain(1, 16, "nv")
ONE = torch.ones(1, 1, dtype=torch.float64)


def nearest(x, numbers):
    """The nearest of a format's numbers, of two the one with an even code."""
    code = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(x)), i % 2))
    return math.copysign(numbers[code], x)


def round_plainly(block, total):
    """Round a block of a tensor with this largest value (NVIDIA 2025, appendix B, equations 1 to 6)."""
    outer = 6 * 448 / total
    inner = max(nearest(max(map(abs, block)) / 6 * outer, E4M3_NUMBERS), 2.0**-9)
    return [nearest(x * outer / inner, NUMBERS) / outer * inner for x in block]


def test_all_numbers_and_their_ties():
    """From 0 past the largest in steps of 1/8: all numbers, all ties between them, and what saturates."""
    x = torch.arange(-80, 81, dtype=torch.float64).view(1, -1) / 8
    found = encode(x, ONE, E2M1, Grain(0, 0)).codes.double().flatten().tolist()
    assert found == [nearest(value, NUMBERS) for value in x.flatten().tolist()]
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]], dtype=torch.float64)
    assert encode(ties, ONE, E2M1, Grain(0, 0)).codes.tolist() == [[0, 1, 1, 2, 2, 4, 4]]
    assert set(map(abs, found)) == set(NUMBERS)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_two_levels_of_scales(m, k, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-6, 3, (m, 1), generator=generator)  # some rows have subnormal scales, or the least
    found, total = quantise(x, E2M1, ROW).values(torch.float64), x.abs().max().item()
    for i in range(m):
        for j in range(0, k, 16):
            expected = round_plainly(x[i, j : j + 16].tolist(), total)
            assert found[i, j : j + 16].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_blocks_and_extreme_tensors(dtype):
    for size in (1e-45, 1e-38, 1e-30, 1.0, 3e38):
        x = torch.zeros(3, 32, dtype=dtype)
        x[0, 0], x[1, 16] = size, -size * 1e-5
        values = quantise(x, E2M1, ROW).values(dtype)
        assert values.isfinite().all()
        assert (values[0, 1:] == 0).all() and (values[1, :16] == 0).all() and (values[2] == 0).all()
        if size >= 1e-30:
            assert values[0, 0].item() == pytest.approx(size, rel=1e-6)
            # 2^-9 is the least scale: the small block has the codes of that one
            assert values[1, 16].item() == pytest.approx(round_plainly([-size * 1e-5], size)[0], rel=1e-6)
    assert not quantise(torch.zeros(2, 16, dtype=dtype), E2M1, ROW).values(dtype).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad):
    x = torch.ones(3, 40)
    x[1, 5] = bad
    assert not quantise(x, E2M1, ROW).values(torch.float32)[1, 5].isfinite()


def test_a_part_of_a_tensor_takes_the_scale_of_all_of_it():
    x = torch.randn(32, 64, dtype=torch.float64) * torch.logspace(-3, 0, 64, dtype=torch.float64)
    complete, part = quantise(x, E2M1, ROW), x[:, :32]
    scale = compute_scale(largest(part, ROW), E2M1, ROW, x.abs().max())
    assert torch.equal(scale, complete.scale[:, :2])
    assert not torch.equal(compute_scale(largest(part, ROW), E2M1, ROW), scale)


def test_a_weight_and_its_transpose_have_the_same_codes():
    square = Grain(16, 16, "nv")
    weight = torch.randn(48, 80)
    assert torch.equal(quantise(weight, E2M1, square).values(torch.float32).t(),
                       quantise(weight.t(), E2M1, square).values(torch.float32))


def test_rotated_matrices_have_the_same_product():
    """Also where the tokens do not fill a block of 16."""
    for tokens in (16, 48, 21):
        a, b = torch.randn(5, tokens, dtype=torch.float64), torch.randn(7, tokens, dtype=torch.float64)
        torch.testing.assert_close(rotate(a) @ rotate(b).t(), a @ b.t(), rtol=1e-12, atol=1e-12)
    eye = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(rotate(eye) @ rotate(eye).t(), eye, rtol=0, atol=1e-15)
    assert torch.equal(rotate(eye).abs(), torch.full((16, 16), 0.25, dtype=torch.float64))
    one = torch.zeros(1, 16)
    one[0, 3] = 8.0
    assert rotate(one).abs().max() == 2.0, "an outlier spreads over its block"


@pytest.mark.parametrize("which", [0, 1])
def test_drawn_rounding_is_unbiased(which):
    """Each value over many positions: only its two neighbours, with the value as their mean."""
    values = torch.tensor([0.1, 0.25, 0.6, 1.4, 1.75, 2.2, 3.9, 4.5, 5.9, -0.3, -2.7], dtype=torch.float64)
    draws = draw_rounding(3, 0, 40_000, torch.arange(len(values)))[which]
    x = values.expand(40_000, -1)
    found = encode(x, ONE, E2M1, Grain(0, 0), draws).codes.double()
    for value, column in zip(values.tolist(), found.t(), strict=True):
        low = max(number for number in NUMBERS if number <= abs(value))
        high = min(number for number in NUMBERS if number >= abs(value))
        assert {abs(number) for number in column.tolist()} == {low, high}
    deviation = 1.0 / 40_000**0.5  # at most half of a unit of 2
    assert (found.mean(0) - values).abs().max() < 4 * deviation
    exact = torch.tensor([[-number for number in NUMBERS] + NUMBERS], dtype=torch.float64).expand(2_000, -1)
    draws = draw_rounding(3, 0, 2_000, torch.arange(16))[which]
    assert torch.equal(encode(exact, ONE, E2M1, Grain(0, 0), draws).codes.double(), exact)


def test_draws_depend_on_positions_alone():
    def draw(key, start, tokens, features):
        return torch.stack(draw_rounding(key, start, tokens, features))

    complete = draw(5, 96, 32, torch.arange(24))
    assert torch.equal(draw(5, torch.tensor(112), 16, torch.arange(8, 20)), complete[:, 16:, 8:20])
    assert ((complete > 0) & (complete < 1)).all()
    for other in (draw(6, 96, 32, torch.arange(24)), draw(5, 128, 32, torch.arange(24)), complete.flip(0),
                  draw(5, 96 + 2**32, 32, torch.arange(24)), draw(5, 96, 32, torch.arange(24, 48))):
        assert (other == complete).sum() < 5
    assert len({RoundingDraws(seed).key(layer) for seed in (5, 6) for layer in ("q", "k")}) == 4


def test_recipe():
    recipe = Recipe.from_config("nvfp4", Float8Config())
    assert recipe.kinds == (E2M1,) * 3
    assert [recipe.grains[what] for what in (INPUT, WEIGHT, GRADIENT)] == [ROW, Grain(16, 16, "nv"), ROW]
    assert [recipe.is_square(what) for what in (INPUT, WEIGHT, GRADIENT)] == [False, True, False]
    assert recipe.rotates and not Recipe.from_config("mxfp8", Float8Config()).rotates
    assert not recipe.is_native(torch.bfloat16, torch.device("cpu"))
    assert 6 * E4M3.largest == 2688
