"""The shapes of the learning-rate schedules, for any length of run."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.optim.schedule import learning_rate
from shoal.spec.config import OptimizerConfig

settings = st.fixed_dictionaries({
    "learning_rate": st.floats(1e-6, 1.0),
    "warmup_steps": st.integers(0, 50),
    "decay_fraction": st.floats(0, 1),
    "min_lr_fraction": st.floats(0, 1),
})


def rates(steps: int, **fields) -> list[float]:
    config = OptimizerConfig(**fields)
    return [learning_rate(step, steps, config) for step in range(steps)]


@given(st.integers(1, 200), st.sampled_from(["cosine", "linear", "wsd", "inverse-sqrt", "constant"]), settings)
def test_any_schedule_rises_to_the_peak_then_never_rises_nor_falls_below_the_minimum(steps, schedule, fields):
    found = rates(steps, schedule=schedule, **fields)
    peak, warmup = fields["learning_rate"], fields["warmup_steps"]
    for step, rate in enumerate(found[:warmup]):
        assert rate == pytest.approx(peak * (step + 1) / warmup)
    after = found[warmup:]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    assert all(peak * fields["min_lr_fraction"] * (1 - 1e-12) <= rate <= peak * (1 + 1e-12) for rate in after)
    if after:
        assert after[0] == pytest.approx(peak)


@given(st.integers(1, 200), settings)
def test_constant_stays_at_the_peak(steps, fields):
    after = rates(steps, schedule="constant", **fields)[fields["warmup_steps"]:]
    assert all(rate == fields["learning_rate"] for rate in after)


@given(st.integers(2, 200), settings)
def test_cosine_is_half_a_turn_of_it(steps, fields):
    peak, floor, warmup = fields["learning_rate"], fields["min_lr_fraction"], fields["warmup_steps"]
    length = max(1, steps - warmup)
    for done, rate in enumerate(rates(steps, schedule="cosine", **fields)[warmup:]):
        turn = math.cos(math.pi * done / length)
        assert rate == pytest.approx(peak * (floor + (1 - floor) * 0.5 * (1 + turn)))


@given(st.integers(1, 200), settings)
def test_wsd_is_flat_and_then_a_straight_line(steps, fields):
    peak, floor = fields["learning_rate"], fields["min_lr_fraction"]
    part, warmup = fields["decay_fraction"], fields["warmup_steps"]
    length = max(1, steps - warmup)
    for done, rate in enumerate(rates(steps, schedule="wsd", **fields)[warmup:]):
        left = (length - done) / length
        expected = peak if part == 0 or left >= part else peak * (floor + (1 - floor) * left / part)
        assert rate == pytest.approx(expected)


@given(st.integers(2, 200), settings)
def test_linear_is_a_straight_line(steps, fields):
    peak, floor, warmup = fields["learning_rate"], fields["min_lr_fraction"], fields["warmup_steps"]
    length = max(1, steps - warmup)
    for done, rate in enumerate(rates(steps, schedule="linear", **fields)[warmup:]):
        assert rate == pytest.approx(peak * (1 - (1 - floor) * done / length))


@given(st.integers(2, 200), settings)
def test_inverse_sqrt_goes_on_from_the_warm_up_whatever_the_length_of_the_run(steps, fields):
    peak, floor, warmup = fields["learning_rate"], fields["min_lr_fraction"], max(1, fields["warmup_steps"])
    for done, rate in enumerate(rates(steps, schedule="inverse-sqrt", **fields)[fields["warmup_steps"]:]):
        assert rate == pytest.approx(peak * max(floor, (warmup / (warmup + done)) ** 0.5))


def test_where_the_runs_end():
    fields = {"learning_rate": 1.0, "warmup_steps": 10, "decay_fraction": 0.2, "min_lr_fraction": 0.1}
    assert rates(1010, schedule="constant", **fields)[-1] == 1.0
    assert rates(1010, schedule="cosine", **fields)[-1] == pytest.approx(0.1, abs=1e-4)
    wsd = rates(1010, schedule="wsd", **fields)
    assert wsd[809] == 1.0 and wsd[811] < 1.0 and wsd[-1] == pytest.approx(0.1045)
