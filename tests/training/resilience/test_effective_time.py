"""The share of the wall-clock that counted, against a plain count of each step's last making."""

import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.training.resilience.effective_time import POINTS, EffectiveTime

Attempts = st.lists(st.tuples(st.integers(0, 30), st.lists(st.floats(0.01, 5.0), max_size=30)), min_size=1, max_size=8)


@given(Attempts)
def test_each_step_counts_once_as_it_was_last_made(attempts):
    account, last = EffectiveTime(), {}
    done = 0
    for back, seconds in attempts:
        done = max(0, done - back)  # the newest state
        last = {step: spent for step, spent in last.items() if step <= done}
        account.begun(done)
        for n, spent in enumerate(seconds):
            done += 1
            last[done] = spent
            account.stepped(done, sum(seconds[: n + 1]))
    assert account.counted == pytest.approx(sum(last.values()))


def test_steps_between_two_looks_are_taken_as_equally_long():
    account = EffectiveTime()
    account.begun(0)
    account.stepped(4, 8.0)
    account.begun(3)  # looked at after 4 steps alone
    assert account.counted == pytest.approx(6.0)


def test_a_long_run_keeps_few_points():
    account = EffectiveTime()
    account.begun(0)
    for look in range(2, 2 * POINTS):  # two at each step
        account.stepped(look // 2, look // 2 / 10)
    assert len(account._course) == POINTS
    for step in range(POINTS, 5 * POINTS):
        account.stepped(step, step / 10)
    assert len(account._course) <= POINTS + 1
    account.begun(1234)
    assert account.counted == pytest.approx(123.4)


def test_the_share_is_of_the_wall_clock():
    with patch.object(time, "monotonic", side_effect=[100.0, 110.0]):
        account = EffectiveTime()
        assert account.counted == 0  # a run that fails before its first step
        account.begun(0)
        account.stepped(3, 7.5)
        assert account.counted / account.seconds == pytest.approx(0.75)
