"""Spikes are seen, and only spikes; batches that are left out are left out alone."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.training.resilience.spikes import FEWEST, Skips, SpikeDetector

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda r: (r[0], r[0] + r[1])), max_size=5)


def a_run(steps: int = 200, seed: int = 0) -> list[tuple[float, float]]:
    """Losses that fall as a training's do, with noise, and gradient norms of about 1."""
    rng = random.Random(seed)
    return [(2 + 4 * math.exp(-t / 50) + rng.gauss(0, 0.05), math.exp(rng.gauss(0, 0.3))) for t in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_the_noise_of_a_training_is_no_spike(seed):
    spikes = SpikeDetector(factor=10, window=32)
    assert [spikes.look(*step) for step in a_run(seed=seed)] == [None] * 200


@pytest.mark.parametrize("what, step, value", [("loss", 100, 6.0), ("gradient norm", 20, 40.0), ("loss", 199, 6.0)])
def test_a_spike_is_seen_when_it_comes_and_what_follows_it_is_usual(what, step, value):
    spikes, run = SpikeDetector(factor=10, window=32), a_run()
    run[step] = (value, run[step][1]) if what == "loss" else (run[step][0], value)
    seen = {t: found for t, (loss, norm) in enumerate(run) if (found := spikes.look(loss, norm))}
    assert seen.keys() == {step}
    assert seen[step].what == what and seen[step].value == value and seen[step].times > 10
    assert str(seen[step]).startswith(f"{what} {value:.4g} is ")


def test_several_spikes_within_the_window_hide_none():
    """As they would from a detector by mean and deviation."""
    spikes, run = SpikeDetector(factor=10, window=32), a_run()
    for step in (100, 101, 102, 104, 106):
        run[step] = (8.0, 1.0)
    assert [t for t, values in enumerate(run) if spikes.look(*values)] == [100, 101, 102, 104, 106]


def test_too_few_steps_and_values_that_are_no_numbers_make_no_spike():
    spikes = SpikeDetector(factor=10, window=32)
    for _ in range(FEWEST - 1):
        assert spikes.look(2.0, 1.0) is None
    assert spikes.look(2.0, math.inf) is None  # a skipped step, whose norm is not taken in
    assert spikes.look(2.0, 900.0) is None
    assert spikes.look(2.0, math.inf) is spikes.look(math.nan, 1.0) is None  # nor is it one later
    assert spikes.look(2.001, 1.0) is None  # constant so far: hardly moved
    assert spikes.look(2.5, 1.0)


@pytest.mark.parametrize("usual", [2.0, 0.0])
def test_a_spike_can_follow_the_fewest_steps_that_have_a_scale(usual):
    """Zeros have none."""
    spikes = SpikeDetector(factor=10, window=32)
    for _ in range(FEWEST):
        assert spikes.look(usual, 1.0) is None
    assert bool(spikes.look(usual + 0.5, 1.0)) == bool(usual)


def test_a_run_that_is_interrupted_sees_the_same():
    whole, first, second = (SpikeDetector(factor=4, window=16) for _ in range(3))
    run = a_run()
    run[110] = (7.0, 1.0)
    expected = [whole.look(*values) for values in run]
    assert [first.look(*values) for values in run[:105]] == expected[:105]
    second.restore(first.state())
    assert [second.look(*values) for values in run[105:]] == expected[105:]


@given(RANGES)
def test_what_is_left_out_is_left_out_and_the_rest_keeps_its_order(ranges):
    skips = Skips(ranges)
    out = {batch for start, stop in ranges for batch in range(start, stop)}
    assert [skips.batch(step) for step in range(60)] == [b for b in range(200) if b not in out][:60]
    assert Skips(skips.ranges).ranges == skips.ranges  # as a checkpoint gives them back


@given(RANGES, st.integers(0, 30), st.integers(0, 5))
def test_batches_of_steps_are_left_out_on_top(ranges, first, more):
    skips = Skips(ranges)
    fewer = skips.without(first, first + more)
    before = [skips.batch(step) for step in range(80)]
    assert [fewer.batch(step) for step in range(40)] == (before[:first] + before[first + more + 1 :])[:40]
