"""A run loses ranks and continues with fewer replicas; the lost ones join after a step, and the losses are the same."""

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.launch.devices import LOST_FILE
from shoal.launch.local_launcher import RankProcess
from shoal.launch.supervisor import Supervisor
from shoal.launch.torch_elastic import refuse_shrink
from shoal.spec.config import RunConfig, build_config
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from tests.trainings.runs import checkpoints, curve, logged, wait_for
from tests.trainings.supervised import config_of, train_undisturbed

STEPS = 20


@pytest.fixture
def started(monkeypatch) -> list[RankProcess]:
    """The processes that a supervisor starts."""
    found: list[RankProcess] = []
    build = RankProcess.__init__
    monkeypatch.setattr(RankProcess, "__init__", lambda self, *a, **o: (found.append(self), build(self, *a, **o))[0])
    return found


@pytest.fixture(scope="module")
def alone(corpus, rank_server, tmp_path_factory) -> Callable[[int], Path]:
    """Return the folder of an undisturbed run with a global batch on one device, which is made once."""

    @cache
    def train(batch: int) -> Path:
        config = config_of(
            corpus, parallel={"dp": 1, "zero": 0}, checkpoint={"every": 0},
            train={"precision": "fp64", "global_batch": batch, "steps": STEPS},
        )  # fmt: skip
        return train_undisturbed(config, tmp_path_factory.mktemp("alone") / "run", rank_server)

    return train


def assert_same_losses(folder: Path, other: Path) -> None:
    """Equal to rounding in float64, and no step is missing or logged twice."""
    assert [step for step, _, _ in curve(folder)] == list(range(1, STEPS + 1))
    for (_, loss, norm), (_, same_loss, same_norm) in zip(curve(folder), curve(other), strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-9) and norm == pytest.approx(same_norm, rel=1e-9)
    assert STEPS in checkpoints(folder)


def shrinking(corpus: Path, parallel: dict, **sections: dict) -> RunConfig:
    failover = {"memory_every": 1, "restarts": 4, "shrink": "replicas"} | sections.pop("failover", {})
    train = {"precision": "fp64", "global_batch": 6, "steps": STEPS} | sections.pop("train", {})
    return config_of(corpus, parallel=parallel, failover=failover, train=train, checkpoint={"every": 0}, **sections)


def story(folder: Path) -> list[object]:
    """What happened: the ranks of each layout, and how the run continued."""
    kinds = {"replanned": "ranks", "recovered": "kind", "joined": "kind"}
    return [event[kinds[event["event"]]] for event in read_events(folder) if event["event"] in kinds]


def test_without_a_fault_the_layout_stays(supervised, corpus):
    code, folder = supervised(shrinking(corpus, {"dp": 2}, train={"global_batch": 4, "steps": 3}))
    assert code == 0 and not story(folder) and len(curve(folder)) == 3


def test_the_replicas_that_are_left_go_on_and_the_lost_one_joins(supervised, alone, corpus, started, capfd):
    """Rank 0 of two replicas of two ranks is killed, and the rank that took its place."""
    config = shrinking(corpus, {"tp": 2}, train={"global_batch": 4})
    code, folder = supervised(config, "kill@4:0:F,,kill@+2:3:R")
    said = capfd.readouterr().err
    assert code == 0, said
    assert story(folder) == [2, "in process", 4, "in process"] * 2, said
    assert len(started) == 4 + 2  # nothing but the lost ranks
    assert "3 of 4 ranks available: now on" in said and "4 of 4 ranks available: now on" in said
    assert not any(event["lost"] > 1 for event in read_events(folder) if event["event"] in ("recovered", "joined"))
    assert_same_losses(folder, alone(4))


def test_a_replica_joins_when_its_device_is_back(supervised, alone, corpus, monkeypatch, tmp_path):
    """Three replicas; a spare takes the place of the first lost rank, and then rank 0 is lost with its device."""
    config = shrinking(corpus, {"dp": 3}, failover={"spares": 1}, testing={"min_step_seconds": 0.05})
    monkeypatch.setenv("LOST_DEVICES", "[[], [0]]")
    monkeypatch.setattr("shoal.launch.supervisor.REPLACE_SECONDS", 0.1)

    def restore() -> None:
        wait_for(lambda: logged(tmp_path / "run") >= 6)
        (tmp_path / "run" / LOST_FILE).write_text(json.dumps([]))

    thread = threading.Thread(target=restore)
    thread.start()
    code, folder = supervised(config, "kill@2:1:F,kill@4:0:B")
    thread.join()
    assert code == 0
    assert story(folder) == ["in process", 2, "in process", 3, "in process"]
    assert_same_losses(folder, alone(6))


def test_a_device_that_is_back_after_a_restart_on_fewer_is_used(supervised, alone, corpus, monkeypatch, tmp_path):
    """The only replica that was left is lost too, so that all processes are replaced, on one device."""
    config = shrinking(corpus, {"dp": 2}, train={"global_batch": 4}, testing={"min_step_seconds": 0.05})
    monkeypatch.setenv("LOST_DEVICES", "[[0], [0]]")
    monkeypatch.setattr("shoal.launch.supervisor.REPLACE_SECONDS", 0.1)

    def restore() -> None:
        wait_for(lambda: story(tmp_path / "run") == [1, "in process", "restart"])
        (tmp_path / "run" / LOST_FILE).write_text(json.dumps([]))

    thread = threading.Thread(target=restore)
    thread.start()
    code, folder = supervised(config, "kill@3:0:F,kill@+2:0:F")
    thread.join()
    assert code == 0
    assert story(folder) == [1, "in process", "restart", 2, "restart"]
    assert [event["lost"] for event in read_events(folder) if event["event"] == "joined"] == [0]
    assert_same_losses(folder, alone(4))


def test_a_stop_while_a_replica_joins_is_saved(supervised, corpus, monkeypatch, capfd):
    """The replacement has no handler of signals yet."""
    decide = Supervisor._should_restart

    def interrupt(supervisor, ending) -> bool:
        if ending.regrouped:
            os.kill(os.getpid(), signal.SIGINT)
        return decide(supervisor, ending)

    monkeypatch.setattr(Supervisor, "_should_restart", interrupt)
    code, folder = supervised(shrinking(corpus, {"dp": 2}, train={"global_batch": 4, "steps": 4000}), "kill@4:0:F")
    said = capfd.readouterr().err
    assert code == 0, said
    assert max(checkpoints(folder)) == logged(folder) < 4000 and story(folder)[:3] == [1, "in process", 2], said


@pytest.mark.parametrize(("values", "why"), [
    ({"parallel": {"dp": 1}}, "parallel.dp = 1: no replica is left"),
    ({"failover": {"memory_every": 0}}, "failover.memory_every = 0: replicas that join take the state from memory"),
    ({"failover": {"restarts": 0}}, "failover.restarts = 0: no process survives a loss"),
    ({"failover": {"recovery_timeout_seconds": 0}}, "recovery_timeout_seconds = 0: no process survives a loss"),
    ({"parallel": {"sync": "local-sgd"}}, "parallel.sync = .*: its replicas share no common state"),
])  # fmt: skip
def test_what_cannot_go_on_with_fewer_replicas_is_refused(values, why):
    asked = {
        "parallel": {"dp": 2}, "failover": {"shrink": "replicas", "memory_every": 1}, "train": {"global_batch": 4},
    }
    config = build_config({name: section | values.get(name, {}) for name, section in asked.items()})
    with pytest.raises(UsageError, match=why):
        check(config)
    with pytest.raises(UsageError, match=r"failover\.shrink = 'replicas' on ranks of torchrun or SLURM"):
        refuse_shrink(config)
