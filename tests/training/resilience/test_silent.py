"""Trouble that no error tells of: what a run goes back to, and what it leaves out, then and after a restart."""

from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.launch.worker_pool import RankError
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from shoal.training.resilience.silent_failure_checks import find_slowest
from tests.trainings.failing import (
    BAD_LOSS,
    FAR,
    ComputesOtherwise,
    Drifts,
    LeavesOut,
    Spikes,
    SpikesAndDies,
    Tells,
    train,
)
from tests.trainings.runs import checkpoints, curve, same_bits, small_config

STEPS = 14


TWO_RANKS = {"dp": 2, "zero": 1, "micro_batch": 2}


def settings_of(corpus: Path, parallel=TWO_RANKS, every=4, **failover) -> RunConfig:
    train = {"steps": STEPS, "validate_every": 0}
    saved = {"every": every, "asynchronous": False}  # which one is the newest must not depend on how fast it is
    return small_config(corpus, parallel, model={"layers": 1}, train=train, checkpoint=saved, failover=failover)


@pytest.fixture
def config(corpus, tmp_path):
    def made(*parallel, memory_every=3, **settings) -> RunConfig:
        return settings_of(corpus, *parallel, memory_every=memory_every, memory_folder=str(tmp_path), **settings)

    return made


def same_end(one: Path, other: Path) -> bool:
    return curve(one) == curve(other) and same_bits(checkpoints(one)[STEPS], checkpoints(other)[STEPS])


# ---- spikes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_the_batches(corpus, pool, tmp_path_factory) -> Path:
    """The run that never had those which are left out."""
    folder = tmp_path_factory.mktemp("without") / "run"
    train(pool, LeavesOut, settings_of(corpus), folder)
    return folder


@pytest.mark.parametrize("memory_every", [3, 0])
def test_a_spike_is_left_behind_with_the_batches_since_also_by_a_restart(
    memory_every, without_the_batches, config, pool, tmp_path
):
    """The state is that after step 6, as the one after step 9 is too near; on disk alone, it is that after step 6 too.

    What was left out is left out by the run that goes on after a failure, too.
    """
    settings = {"spike_factor": FAR, "spike_window": 8, "spike_rollbacks": 1, "spike_margin": 2}
    run = config(memory_every=memory_every, every=100 if memory_every else 3, **settings)
    train(pool, Spikes, run, tmp_path / "whole")
    assert same_end(tmp_path / "whole", without_the_batches)
    with pytest.raises(RankError, match="is lost"):
        train(pool, SpikesAndDies, run, tmp_path / "dies")
    assert train(pool, Spikes, run, tmp_path / "dies", resume=True).startswith("step 9, from ")
    assert same_end(tmp_path / "dies", without_the_batches)
    happened = [(e["event"], e["step"]) for e in read_events(tmp_path / "dies")]
    assert happened == [("spike", 10), ("rolled back", 6)]


def test_without_a_roll_back_left_a_spike_is_only_told(config, pool, tmp_path):
    run = config(spike_factor=FAR, spike_window=8)
    train(pool, Spikes, run, tmp_path / "run")
    assert [step for step, loss, _ in curve(tmp_path / "run") if loss == BAD_LOSS] == [10]
    assert len(curve(tmp_path / "run")) == STEPS


# ---- replicas --------------------------------------------------------------------------------------------------------


def test_what_was_saved_since_replicas_last_agreed_is_not_gone_on_from(config, pool, tmp_path):
    """Compared after 5 and 10; the disk has 8 and memory 6 and 9, all from after the fault."""
    run = config({"dp": 4, "micro_batch": 2}, check_replicas_every=5)
    run = run.model_copy(update={"train": run.train.model_copy(update={"transport": "backend"})})
    train(pool, Tells, run, tmp_path / "reference")
    with pytest.raises(RankError, match=r"after step 10: rank 1 .* differs from the 3 other replicas in embed"):
        train(pool, Drifts, run, tmp_path / "run")
    assert sorted(checkpoints(tmp_path / "run")) == [4]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("set-aside-step-00000008-*")]
    assert train(pool, Tells, run, tmp_path / "run", resume=True).startswith("step 4, from /")
    assert same_end(tmp_path / "run", tmp_path / "reference")


def test_a_step_that_gave_two_results_costs_what_was_saved_since_one_gave_the_same(config, pool, tmp_path):
    run = config(reexecute_every=4, memory_every=0)
    train(pool, Tells, run, tmp_path / "reference")
    with pytest.raises(RankError, match="another result"):
        train(pool, ComputesOtherwise, run, tmp_path / "run")
    assert sorted(checkpoints(tmp_path / "run")) == [4]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("set-aside-step-00000008-*")]
    assert train(pool, Tells, run, tmp_path / "run", resume=True).startswith("step 4, from /")
    assert same_end(tmp_path / "run", tmp_path / "reference")


def test_a_healthy_run_with_every_check_is_the_same_run(config, pool, tmp_path):
    plain = config(memory_every=0)
    watched = config(
        check_replicas_every=2, spike_factor=FAR, spike_rollbacks=2, stragglers_every=5, reexecute_every=4,
        reexecute_on="replica",
    )
    train(pool, Tells, plain, tmp_path / "plain")
    train(pool, Tells, watched, tmp_path / "watched")
    assert same_end(tmp_path / "plain", tmp_path / "watched")
    told = [e for e in read_events(tmp_path / "watched") if e["event"] == "slowest"]
    assert [e["step"] for e in told] == [5, 10]
    assert all(0 < e["usual"] <= e["computing"] < e["total"] for e in told)
    assert all(len(e["ranks"]) == 2 and e["ranks"][e["rank"]] == max(e["ranks"]) == e["computing"] for e in told)
    assert all(w == pytest.approx(e["total"] - c) for e in told for c, w in zip(e["ranks"], e["waiting"], strict=True))


# ---- stragglers, and what is refused ---------------------------------------------------------------------------------


def test_the_slowest_rank_is_named():
    found = find_slowest([(0.2, "a"), (0.2, "a"), (0.5, "b"), (0.1, "b")], total=0.6)
    assert str(found) == "slowest: rank 2 on b computes 0.5 s of each step, 2.50 times the median; the step takes 0.6 s"


@pytest.mark.parametrize(
    "parallel, failover, message",
    [
        ({}, {"spike_rollbacks": 1}, "failover.spike_factor = 0: spike detection is off"),
        ({"micro_batch": 2}, {"reexecute_every": 1, "reexecute_on": "replica"}, "parallel.dp = 1"),
        ({"dp": 2, "sync": "local-sgd"}, {"check_replicas_every": 1}, "with failover.check_replicas_every = 1"),
        ({"dp": 2, "sync": "sgp"}, {"reexecute_every": 5}, "with failover.reexecute_every = 5"),
    ],
)
def test_what_nothing_would_come_of_is_refused(parallel, failover, message, corpus):
    config = small_config(corpus, parallel, failover=failover, train={"validate_every": 0}, checkpoint={"every": 0})
    with pytest.raises(UsageError, match=message):
        check(config)
