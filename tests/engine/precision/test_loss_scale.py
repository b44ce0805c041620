"""The loss scale grows, backs off, and goes on from a checkpoint; what is no scale is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.precision.loss_scale import LossScale
from shoal.spec.config.sections import LossScaleConfig


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_it_follows_the_paper(finite, interval):
    """Micikevicius et al. 2018, section 3.2: times growth after so many good steps in a row, times back-off after each
    overflow, and never below the smallest."""
    scale = LossScale(LossScaleConfig(initial=64, interval=interval, smallest=4))
    expected, row = 64.0, 0
    for good in finite:
        (scale.made if good else scale.overflowed)()
        row = row + 1 if good else 0
        if good and row % interval == 0:
            expected *= 2
        elif not good:
            expected = max(4.0, expected / 2)
        assert scale.value == expected and scale.exhausted == (expected == 4)
    assert scale.skipped == finite.count(False)


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_restored_one_goes_on_alike(before, after):
    config = LossScaleConfig(initial=1024, interval=3)
    one, other = LossScale(config), LossScale(config)
    for good in before:
        (one.made if good else one.overflowed)()
    other.restore(one.state())
    for good in after:
        for scale in (one, other):
            (scale.made if good else scale.overflowed)()
    assert one.state() == other.state()


def test_a_checkpoint_without_one_starts_afresh():
    scale = LossScale(LossScaleConfig(initial=8))
    scale.restore(None)
    assert scale.state() == {"value": 8.0, "good": 0, "skipped": 0}


@pytest.mark.parametrize("saved", [
    65536.0, [], {}, {"value": 2.0, "good": 1}, {"value": 2.0, "good": 1, "skipped": 0, "more": 1},
    {"value": 0.0, "good": 0, "skipped": 0}, {"value": -2.0, "good": 0, "skipped": 0},
    {"value": math.nan, "good": 0, "skipped": 0}, {"value": math.inf, "good": 0, "skipped": 0},
    {"value": "2", "good": 0, "skipped": 0}, {"value": 2.0, "good": -1, "skipped": 0},
    {"value": 2.0, "good": True, "skipped": 0}, {"value": 2.0, "good": 0, "skipped": 0.5},
])  # fmt: skip
def test_what_is_no_scale_is_refused(saved):
    scale = LossScale(LossScaleConfig())
    with pytest.raises(UsageError, match="the checkpoint's loss scale is"):
        scale.restore(saved)
    assert scale.value == 2.0**16
