"""8-bit codes against what the formats' papers say, element by element; scales of every grain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.precision.float8 import Grain, compute_scale, encode, largest
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E4M3, E5M2
from tests.engine.precision.quantise import quantise

KINDS = [E4M3, E5M2]
GRAINS = [Grain(0, 0), Grain(1, 0), Grain(1, 8, "power"), Grain(8, 8, "power"), Grain(1, 32, "mx")]


def grid(kind):
    """Every number that a format has from 0 on, by its definition (Micikevicius et al. 2022, table 1)."""
    subnormal = [i * 2.0**kind.tiniest for i in range(2**kind.digits)]
    top = math.frexp(kind.largest)[1] - 1
    normal = [(1 + i / 2**kind.digits) * 2.0**e for e in range(kind.smallest, top + 1) for i in range(2**kind.digits)]
    return torch.tensor([x for x in subnormal + normal if x <= kind.largest], dtype=torch.float64)


def nearest(x, kind):
    """The nearest number of the format, the even one of two; saturating."""
    numbers = grid(kind)
    distance = (x.abs().unsqueeze(-1) - numbers).abs()
    low = distance.argmin(-1)
    after = (low + 1).clamp(max=len(numbers) - 1)
    tie = distance.gather(-1, after.unsqueeze(-1)).squeeze(-1) == distance.gather(-1, low.unsqueeze(-1)).squeeze(-1)
    return numbers[torch.where(tie & (low % 2 == 1), after, low)] * x.sign()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@given(st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=20))
def test_a_code_is_the_nearest_number(kind, values):
    x = torch.tensor([values], dtype=torch.float64)
    codes = encode(x, torch.ones(1, 1, dtype=torch.float64), kind, Grain(0, 0))
    assert torch.equal(codes.values(torch.float64).abs(), nearest(x, kind).abs())


@settings(max_examples=40)
@given(st.sampled_from(GRAINS), st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 70), st.integers(0, 99))
def test_every_block_uses_the_format_to_its_end(grain, kind, m, k, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-12, 12, (m, 1), generator=generator)
    found = quantise(x, kind, grain)
    rows, columns = grain.rows or m, grain.columns or k
    for i in range(0, m, rows):
        for j in range(0, k, columns):
            block = x[i : i + rows, j : j + columns]
            scale = found.scale[i // rows, j // columns].item()
            most = block.abs().max().item() * scale
            if grain.scale == "exact":
                assert most == pytest.approx(kind.largest, rel=1e-12)
            else:
                assert math.frexp(scale)[0] == 0.5
                top = math.frexp(kind.largest)[1] - 1
                low, high = (kind.largest / 2, kind.largest) if grain.scale == "power" else (2.0**top, 2.0 ** (top + 1))
                assert low <= most * (1 + 1e-12) and most <= high
            codes = found.codes[i : i + rows, j : j + columns].double()
            assert torch.equal(codes.abs(), nearest(block * scale, kind).abs())
            values = found.values(torch.float64)[i : i + rows, j : j + columns]
            assert torch.equal(values, codes / scale)


def test_mx_scales_are_the_specifications():
    """OCP MX, section 6.3: 2^(floor(log2 of the largest) - 8) for e4m3, 15 for e5m2; 2^-127 at the least; above 448
    saturates."""
    x = torch.tensor([[1.0] * 32, [1.99] * 32, [3.0] * 32, [2.0**-140] * 32, [0.0] * 32])
    for kind, octave in ((E4M3, 8), (E5M2, 15)):
        inverse = quantise(x, kind, Grain(1, 32, "mx")).scale.reciprocal().flatten().tolist()
        assert inverse == [2.0**-octave, 2.0**-octave, 2.0 ** (1 - octave), 2.0**-127, 1.0]
        e8m0 = torch.tensor(inverse).to(torch.float8_e8m0fnu).float().tolist()
        assert e8m0 == inverse, "every scale is a number of E8M0"
    assert quantise(x, E4M3, Grain(1, 32, "mx")).values(torch.float32)[1, 0] == 1.75


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("small", [1e-30, 1e-34, 1.3e-36, 1e-38, 1e-45])
def test_the_smallest_numbers_do_not_become_nan(grain, kind, small):
    x = torch.zeros(3, 40)
    x[1, 5], x[1, 6] = small, -small / 2
    codes = quantise(x, kind, grain)
    values = codes.values(torch.float32)
    assert torch.equal(values == 0, x == 0) or small < 1e-38
    spacing = 2.0 ** (kind.tiniest - 1) / codes.scale.max().item()  # of subnormal numbers
    assert (values - x).abs().max() <= max(2.0 ** -(kind.digits + 1) * abs(small), spacing)
    assert codes.scale.reciprocal().min() >= 2.0**-127  # what hardware multiplies results by


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(grain, bad):
    x = torch.ones(3, 40)
    x[1, 5] = bad
    assert not quantise(x, E4M3, grain).values(torch.float32)[1, 5].isfinite()


def test_recipes():
    def of(products="float8", **config):
        return Recipe.from_config(products, Float8Config(**config))

    assert of().grains == (Grain(0, 0),) * 3 and of().kinds == (E4M3, E4M3, E5M2)
    assert of(scales="row").grains == (Grain(1, 0),) * 3
    assert of(scales="block").grains == (Grain(1, 128, "power"), Grain(128, 128, "power"), Grain(1, 128, "power"))
    assert of("mxfp8", gradient="e4m3").grains == (Grain(1, 32, "mx"),) * 3
    assert of(gradient="e4m3").kinds[GRADIENT] == E4M3
    turns = {scales: [of(scales=scales).is_square(what) for what in (INPUT, WEIGHT, GRADIENT)]
             for scales in ("tensor", "row", "block")}
    assert turns == {"tensor": [True] * 3, "row": [False] * 3, "block": [False, True, False]}


@given(st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_delayed_scales_follow_the_largest_of_the_history(amaxes, steps, margin):
    recipe = Recipe.from_config("float8", Float8Config(amax="delayed", history=steps, margin=margin))
    history = AmaxHistory(recipe, ["a", "b"], torch.float64, torch.device("cpu"))
    assert history.scale("a", INPUT) is None
    for i, amax in enumerate(amaxes):
        for part in (amax / 2, amax):
            history.note("a", INPUT, torch.tensor([[part]], dtype=torch.float64))
        history.end_step()
        most = max(amaxes[max(0, i + 1 - steps) : i + 1])
        assert history.scale("a", INPUT).item() == pytest.approx(448 / most / 2**margin)
    again = AmaxHistory(recipe, ["a", "b"], torch.float64, torch.device("cpu"))
    mine, saved = (h.state(primary=True)["precision.amax.a"][0].tensor for h in (again, history))
    mine.copy_(saved)
    again.restored()
    assert again.scale("a", INPUT) == history.scale("a", INPUT)
    assert again.scale("b", INPUT) is None, "of which nothing was restored"


def test_what_is_not_finite_is_no_history():
    """Its step was skipped: the scales after it are those before."""
    history = AmaxHistory(Recipe.from_config("float8", Float8Config(amax="delayed", history=2)), ["a"], torch.float64,
                          torch.device("cpu"))
    for most in (4.0, math.inf, math.nan, 4.0):
        history.note("a", INPUT, torch.tensor([[most]]))
        history.end_step()
        assert history.scale("a", INPUT).item() == 448 / 4


def test_blocks_that_do_not_fit_are_short():
    x = torch.arange(1.0, 11.0).view(1, 10)
    most = largest(x, Grain(1, 4))
    assert most.tolist() == [[4.0, 8.0, 10.0]]
    assert compute_scale(most, E4M3, Grain(1, 4)).tolist() == [[112.0, 56.0, pytest.approx(44.8)]]
