import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.data.order import SampleOrder

seeds = st.integers(min_value=0, max_value=2**70)


@given(samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 2**40))
def test_every_epoch_visits_every_sample_once(samples, seed, epoch):
    order = SampleOrder(samples, seed)(epoch * samples + np.arange(samples))
    assert sorted(order.tolist()) == list(range(samples))


@given(samples=st.integers(1, 2**40), seed=seeds, indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_sample_depends_on_its_index_alone(samples, seed, indices):
    order = SampleOrder(samples, seed)
    together = order(indices)
    assert together.tolist() == [int(order([i])[0]) for i in indices]
    assert ((together >= 0) & (together < samples)).all()


@given(samples=st.integers(50, 3000), seed=seeds, epoch=st.integers(0, 2**30))
def test_epochs_and_seeds_differ(samples, seed, epoch):
    first = SampleOrder(samples, seed)(epoch * samples + np.arange(samples))
    following = SampleOrder(samples, seed)((epoch + 1) * samples + np.arange(samples))
    other = SampleOrder(samples, seed + 1)(epoch * samples + np.arange(samples))
    for different in (following, other, np.arange(samples)):
        assert (first == different).mean() < 0.25


@pytest.mark.parametrize("samples", [2, 3, 5, 10, 17])
def test_every_sample_comes_equally_often_at_every_position(samples):
    epochs = 4000
    order = SampleOrder(samples, 7)(np.arange(samples * epochs)).reshape(epochs, samples)
    for position in range(samples):
        counts = np.bincount(order[:, position], minlength=samples)
        chi_squared = ((counts - epochs / samples) ** 2 / (epochs / samples)).sum()
        degrees = samples - 1
        assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


def test_neighbours_are_spread():
    """Samples that are read one after another do not stand together in the corpus."""
    samples = 10_000
    steps = np.abs(np.diff(SampleOrder(samples, 0)(np.arange(samples))))
    assert abs(steps.mean() - samples / 3) < samples / 30


def test_the_order_never_changes_between_versions():
    """A resumed run must go on with the order it began with: these numbers are a promise."""
    assert SampleOrder(1000, 42)([0, 1, 999, 1000, 123456789]).tolist() == [390, 108, 216, 375, 830]


def test_no_negative_index():
    with pytest.raises(ValueError, match="-3"):
        SampleOrder(10, 0)([0, -3])
