"""A run loses a rank, in every way there is, and ends with the same bits; what no restart can help ends at once."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest

from shoal.launch.local_launcher import RankProcess
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.spec.config import save_config
from shoal.training.resilience.events import read_events
from shoal.training.resilience.heartbeat import HeartbeatRecord
from shoal.training.stop import PREEMPTED
from tests.trainings.runs import alive, checkpoints, curve, logged, same_bits, shoal, start, train_in, wait_for
from tests.trainings.supervised import STEPS, config_of


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_events(folder) if event["event"] == kind]


FAULTS = {
    "kill@7:0:F": "was killed by SIGKILL in step 7, forward of micro-batch 0 on stage 0",
    "kill@7:1:R": "was killed by SIGKILL in step 7, reducing gradients",
    "kill@6:0:S": "was killed by SIGKILL in step 6, the optimizer's step",
    "exit@7:1:F": "exited with code 0, though it was not done in step 7, forward of micro-batch 0 on stage 0",
    "raise@7:0:R": "exited with code 1 in step 7, reducing gradients",
    "stop@7:1:B": r"is stopped \(SIGSTOP\) since [\d.]+ s and was ended, in step 7, backward of micro-batch 0",
    "hold@7:0:F": r"is silent since [\d.]+ s and was ended, in step 7, forward of micro-batch 0",
    "stall@7:1:F": r"is stuck since [\d.]+ s and was ended, in step 7, forward of micro-batch 0",
}


TOGETHER = {"ended": list(FAULTS)[:5], "lost": list(FAULTS)[5:]}  # of one run, an attempt for each


@pytest.mark.parametrize("faults", TOGETHER.values(), ids=TOGETHER)
def test_a_lost_rank_is_named_and_nothing_is_lost(faults, supervised, undisturbed, corpus, capfd):
    limit = len(faults) + 1  # the last restart without progress would replace all
    code, folder = supervised(config_of(corpus, failover={"restarts": limit}), ",".join(faults))
    said = capfd.readouterr().err
    assert code == 0, said
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])

    failures, recoveries, [end] = events(folder, "failure"), events(folder, "recovered"), events(folder, "end")
    for fault, failure, recovered in zip(faults, failures, recoveries, strict=True):
        rank = fault.split(":")[1]
        assert re.search(f"rank {rank} {FAULTS[fault]}", said), said
        step = int(fault.partition("@")[2].split(":")[0])
        assert (failure["rank"], failure["step"]) == (int(rank), step - 1)
        assert (recovered["step"], recovered["lost"]) == (4, step - 1 - 4)
        assert recovered["kind"] == ("restart" if fault.startswith("raise") else "in process")
        assert recovered["seconds"] < 20
        if fault.startswith(("stop", "stall")):
            assert "faulty.py" in failure["report"]  # where it stood
        if fault.startswith("stall"):  # and not the one that waits for it
            assert "stuck_here" in failure["report"]
            assert failure["recordings"] == [f"logs/failure-1/collectives-{each}.json" for each in range(2)]
            traces = [json.loads((folder / each).read_text()) for each in failure["recordings"]]
            assert f"recorded before: {folder / failure['recordings'][int(rank)]}" in said
            assert all(each["entries"] and each["pg_config"] for each in traces)
    assert not events(folder, "resumed")  # a user resumes
    assert all(f"restart {i} of at most {limit} without progress" in said for i in range(1, limit))
    assert end["code"] == 0 and end["failures"] == limit - 1 and 0 < end["effective"] < 1
    assert f"effective training time {end['effective']:.1%}" in said
    assert not (folder / PROCESSES_FILE).exists() and not list((folder / "checkpoints").glob(".staging*"))


def replaced(folder: Path) -> list[int]:
    """Return how many processes each rank has had."""
    return [log.read_text().count("---- started") for log in sorted((folder / "logs").glob("rank-*"))]


def test_survivors_keep_their_processes(supervised, corpus, pool, tmp_path, capfd):
    """Two ranks are lost at once, one during the recovery, one with another that is stopped, and rank 0 twice."""
    limits = {"memory_every": 2, "node_ranks": 2, "restarts": 5}
    config = config_of(corpus, parallel={"tp": 2}, failover=limits, checkpoint={"every": 0})
    undisturbed = train_in(pool, config, tmp_path / "undisturbed")
    faults = ["kill@4:1:F&kill@4:2:F", "kill@0:0:", "kill@6:3:R&stop@6:1:B", "kill@8:0:S"]
    code, folder = supervised(config, ",".join(faults))
    said = capfd.readouterr().err
    assert code == 0, said
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert [event["rank"] for event in events(folder, "failure")][1:] == [0, 3, 0]
    kinds = [event["kind"] for event in events(folder, "restart")]
    assert kinds in [["in process"] * 4, ["in process", "in process", "restart", "in process"]], said
    # The second of two that are lost at once may have left before its moment comes. And with one that is stopped, its
    # neighbours may end before the cause is known: then all are replaced.
    more = kinds.count("restart")
    assert replaced(folder) in [[3 + more, one + more, two + more, 2] for one in (2, 3) for two in (1, 2)]
    assert not any(event["lost"] > 3 for event in events(folder, "recovered"))


def test_spares_take_the_place_of_lost_ranks(supervised, undisturbed, corpus, monkeypatch):
    """Also of rank 0, whose output is heard, and of a spare that died itself."""
    started: list[RankProcess] = []
    build = RankProcess.__init__
    monkeypatch.setattr(RankProcess, "__init__", lambda self, *a, **o: (started.append(self), build(self, *a, **o))[0])
    faults = "kill@6:1:B,kill@7:0:F,kill@8:1:S"
    code, folder = supervised(config_of(corpus, failover={"spares": 1, "restarts": 5}), faults)
    assert code == 0 and curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert [event["kind"] for event in events(folder, "recovered")] == ["in process"] * 3
    assert len(started) == 2 + 3 + 1 and replaced(folder)[:2] == [2, 3]  # two ranks, and a new spare each time
    assert not any(psutil.pid_exists(one.pid) and alive(psutil.Process(one.pid)) for one in started)


@pytest.mark.parametrize(("seconds", "processes"), [(1e-3, {2, 3}), (0, {2})], ids=["late", "off"])
def test_survivors_that_are_too_late_are_replaced(seconds, processes, supervised, undisturbed, corpus, monkeypatch):
    monkeypatch.setattr(HeartbeatRecord, "joined", False)  # else all may have met before the supervisor looks
    code, folder = supervised(config_of(corpus, failover={"recovery_timeout_seconds": seconds}), "kill@6:1:B")
    assert code == 0 and curve(folder) == curve(undisturbed)
    assert [event["kind"] for event in events(folder, "recovered")] == ["restart"]
    assert replaced(folder)[0] == 2 and replaced(folder)[1] in processes  # 3 if the survivor left in time but met none


def test_restarts_without_progress_are_bounded_and_the_last_replaces_all(supervised, corpus, capfd):
    code, folder = supervised(config_of(corpus), "kill@6:1:B", always=True)
    assert code == 128 + signal.SIGKILL
    assert [event["step"] for event in events(folder, "failure")] == [5, 5, 5]
    assert [event["kind"] for event in events(folder, "restart")] == ["in process", "restart"]
    assert "not restarting: 2 restarts made no progress past step 5" in capfd.readouterr().err


def test_restarts_with_progress_are_not(supervised, corpus, capfd):
    """Each attempt dies in its second step: every one gets a step further, so that three are not too many."""
    config = config_of(corpus, train={"steps": 4}, checkpoint={"every": 1}, failover={"restarts": 1})
    code, folder = supervised(config, "kill@+2:1:B", always=True)
    assert code == 0, capfd.readouterr().err
    assert len(events(folder, "failure")) == 3


def test_what_raises_before_its_first_step_is_not_restarted(supervised, corpus, capfd):
    code, folder = supervised(config_of(corpus), "raise@0:1:", always=True)
    assert code == 1
    assert len(events(folder, "failure")) == 1 and "the first attempt failed before step 1" in capfd.readouterr().err


def test_a_rank_may_be_lost_before_its_first_heartbeat_before_the_first_checkpoint_and_after_the_last_step(
    supervised, undisturbed, corpus, capfd
):
    """A run loses a rank three times: while all meet, before a first checkpoint, and after the last step."""
    config = config_of(corpus, failover={"restarts": 4})
    code, folder = supervised(config, "stop@start:1:,kill@2:0:B,exit@end:1:")
    said = capfd.readouterr().err
    assert code == 0 and curve(folder) == curve(undisturbed), said
    assert [failure["rank"] for failure in events(folder, "failure")] == [1, 0, 1]
    assert "restart 1 of at most 4" in said
    assert re.search(r"rank 1 is stopped \(SIGSTOP\) since 2[\d.]+ s and was ended before its first heartbeat; ", said)
    assert events(folder, "failure")[2]["where"].startswith("ending after step 10")
    assert [event["step"] for event in events(folder, "recovered")] == [0, 0]


def test_a_run_that_diverges_is_restarted_once(supervised, corpus, capfd):
    code, folder = supervised(config_of(corpus, optimizer={"learning_rate": 1e30, "warmup_steps": 0}))
    said = capfd.readouterr().err
    assert code == 1 and len(events(folder, "failure")) == 2
    first = re.match(r"step (\d+): .*First on .*\nrestarting ", said)
    assert first and f"the run has diverged again after step {first[1]}, so no" in said and "Traceback" not in said


def test_a_stray_signal_to_one_rank_stops_no_run(supervised, undisturbed, corpus, tmp_path):
    def send() -> None:
        wait_for(lambda: logged(tmp_path / "run") >= 3)
        os.kill(json.loads((tmp_path / "run" / PROCESSES_FILE).read_text())["ranks"][1], signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    code, folder = supervised(config_of(corpus, testing={"min_step_seconds": 0.05}))
    thread.join()
    assert code == 0 and curve(folder) == curve(undisturbed)
    assert "SIGTERM ignored: only the parent of the ranks can stop the run" in (folder / "logs/rank-1.log").read_text()


def test_a_usage_error_is_not_restarted(supervised, corpus, capfd):
    code, folder = supervised(config_of(corpus), "usage@6:1:B", always=True)
    assert code == 2 and len(events(folder, "failure")) == 1
    assert capfd.readouterr().err.strip() == "shoal: error: the planted fault"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGUSR1, 75)])
def test_a_stop_is_saved_and_has_its_code(signum, code, supervised, corpus, tmp_path):
    """Ctrl-C is the user's own wish; who sends SIGTERM or SIGUSR1 will start the run again."""
    assert PREEMPTED == 75
    config = config_of(corpus, train={"steps": 4000}, checkpoint={"every": 0})

    def stop() -> None:
        wait_for(lambda: logged(tmp_path / "run") >= 5)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=stop)
    thread.start()
    found, folder = supervised(config)
    thread.join()
    assert found == code
    assert max(checkpoints(folder)) == logged(folder) >= 5
    assert not events(folder, "failure")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 143), (signal.SIGTERM, 75)])
def test_a_stop_before_the_first_step_says_that_nothing_is_saved(signum, code, corpus, tmp_path):
    file, folder = tmp_path / "run.toml", tmp_path / "my run"
    save_config(config_of(corpus), file)
    process = start("train", file, "--run-folder", folder)
    wait_for(lambda: (folder / PROCESSES_FILE).exists())
    process.send_signal(signum)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == code, said
    assert f"nothing is saved; start again with: shoal train --resume '{folder}'" in said
    assert shoal("train", "--resume", folder)[0] == 0
    process = start("train", "--resume", folder, "--train.steps", "100")
    wait_for(lambda: (folder / PROCESSES_FILE).exists())
    process.send_signal(signum)
    assert "nothing is saved" not in process.communicate(timeout=120)[0]


def test_a_dead_server_is_replaced(corpus, tmp_path, undisturbed):
    """Killing it kills all ranks at once."""
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    save_config(config_of(corpus, testing={"min_step_seconds": 0.2}), file)
    process = start("train", file, "--run-folder", folder)
    wait_for(lambda: process.poll() is not None or logged(folder) >= 5)
    who = json.loads((folder / PROCESSES_FILE).read_text())
    os.kill(who["prefork"], signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert not any(psutil.pid_exists(pid) and alive(psutil.Process(pid)) for pid in who["ranks"])


def test_a_killed_supervisor_leaves_nobody_and_loses_nothing(corpus, tmp_path, undisturbed):
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    save_config(config_of(corpus, testing={"min_step_seconds": 0.2}), file)
    process = start("train", file, "--run-folder", folder)
    wait_for(lambda: process.poll() is not None or logged(folder) >= 6)
    who = json.loads((folder / PROCESSES_FILE).read_text())
    process.kill()
    process.communicate()
    gone = [psutil.Process(pid) for pid in (who["prefork"], *who["ranks"]) if psutil.pid_exists(pid)]
    wait_for(lambda: not any(alive(one) for one in gone), 20)
    assert Path(who["scratch"]).is_dir()
    code, said = shoal("train", "--resume", folder)
    assert code == 0 and re.search("resumed after step (4|8)", said), said  # on a busy machine the kill comes late
    assert not Path(who["scratch"]).exists()  # which the next start removes
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
