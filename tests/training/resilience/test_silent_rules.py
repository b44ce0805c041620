"""What a run trusts after a check, what it remembers over a restart, and when it measures: rules without a training."""

from types import SimpleNamespace

import pytest

from shoal.spec.config.sections import FailoverConfig
from shoal.training.resilience import silent_failure_checks
from shoal.training.resilience.replicas import SilentFailure
from shoal.training.resilience.silent_failure_checks import SilentFailureChecks, find_slowest

BAD = SilentFailure("they differ", "replicas differ", [1])


@pytest.fixture
def make(monkeypatch):
    """Make the checks of a run that resumes; `make.looked` lists what they did, and `make.fails` is raised then."""

    def make(step=0, extra=None, **failover) -> SilentFailureChecks:
        layout = SimpleNamespace(world_size=1)
        return SilentFailureChecks(SimpleNamespace(
            config=SimpleNamespace(failover=FailoverConfig(**failover)), runtime=SimpleNamespace(recorders=[]),
            mesh=SimpleNamespace(layout=layout, device=None),
        ), step, extra or {})

    def look(what):
        def note(engine, step, group, *how):
            make.looked.append((what, step, *how))
            if make.fails:
                raise make.fails
        return note

    make.looked, make.fails = [], None
    monkeypatch.setattr(silent_failure_checks, "compare_replicas", look("compared"))
    monkeypatch.setattr(silent_failure_checks, "reexecute", look("computed again"))
    monkeypatch.setattr(silent_failure_checks, "ActionTimer", FakeTimer)
    return make


class FakeTimer:
    def __init__(self, device):
        self.on, self.starts = False, 0

    def start(self):
        self.on, self.starts = True, self.starts + 1

    def compute_seconds(self):
        return 5.0


def test_replicas_are_compared_at_the_start_and_only_then_trusted(make):
    make.fails = BAD
    with pytest.raises(SilentFailure):
        make(check_replicas_every=4)


def test_a_state_is_trusted_only_after_its_check(make):
    guard = make(2, check_replicas_every=4, reexecute_every=3, reexecute_on="replica")
    for step in range(3, 9):
        guard.before_step(step - 1)
        guard.after_step(step, 1.0)
        assert guard.proven == (2 if step < 4 else step // 4 * 4)
    assert make.looked == [("compared", 2), ("computed again", 3, "replica"), ("compared", 4),
                           ("computed again", 6, "replica"), ("compared", 8)]  # fmt: skip
    make.fails = BAD
    with pytest.raises(SilentFailure):
        guard.after_step(12, 1.0)
    assert guard.proven == 8
    guard.restore(10, {})
    assert guard.proven == 8, "a state of after the last good check is not proven by going back to it"
    guard.restore(6, {})
    assert guard.proven == 6


def test_without_comparisons_what_was_computed_twice_is_trusted(make):
    guard = make(2, reexecute_every=3)
    assert guard.proven == 2
    guard.before_step(3)
    assert guard.proven == 3
    make.fails = BAD
    with pytest.raises(SilentFailure):
        guard.before_step(6)
    assert guard.proven == 3


def test_roll_backs_are_counted_over_restarts_and_going_back(make):
    settings = {"spike_factor": 5.0, "spike_window": 8, "spike_rollbacks": 2}
    guard = make(**settings)
    before = guard.state()
    assert guard.may_roll_back()
    guard.restore(0, before)
    assert guard.rollbacks == 1, "the older state does not know of it"
    again = make(extra=guard.state(), **settings)
    assert again.may_roll_back() and not again.may_roll_back() and again.rollbacks == 2


def test_a_resumed_run_finds_the_spikes_that_it_would_have_found(make):
    settings = {"spike_factor": 5.0, "spike_window": 8}
    guard = make(**settings)
    for loss in (2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0, 2.1):
        assert guard.spike(SimpleNamespace(loss=loss, gradient_norm=1.0, tokens=8)) is None
    bad = SimpleNamespace(loss=9.0, gradient_norm=1.0, tokens=8)
    again = make(extra=guard.state(), **settings)
    assert again.spike(bad).what == "loss"
    assert again.spike(SimpleNamespace(loss=9.0, gradient_norm=1.0, tokens=0)) is None, "it has no loss"
    again.restore(0, {})
    assert again.spike(bad) is None, "too few steps"


def test_the_last_steps_before_each_report_are_measured(make):
    guard, reports = make(stragglers_every=20), {}
    for step in range(1, 41):
        guard.before_step(step - 1)
        reports[step] = guard.after_step(step, step)
    assert guard.timer.starts == 2 and not guard.timer.on
    assert [step for step, each in reports.items() if each] == [20, 40]
    assert (reports[40].computing, reports[40].total) == (0.5, 35.5)  # of steps 31 to 40


def test_ranks_whose_work_is_too_short_to_be_measured_are_equally_fast():
    found = find_slowest([(0.0, "a"), (0.0, "b")], total=0.0)
    assert found.times == 1.0 and find_slowest([(2.0, "a")], total=1.9).waiting == (0.0,)
