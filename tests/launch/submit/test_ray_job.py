"""Ranks on a local Ray: placed by it, and started again when one is killed. Needs the extra shoal[ray]."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from shoal.spec.config import save_config
from shoal.training.resilience.events import read_events
from shoal.training.stop import PREEMPTED
from tests.trainings.runs import ROOT, checkpoints, curve, logged, same_bits, wait_for
from tests.trainings.supervised import STEPS, config_of

pytest.importorskip("ray")


@pytest.fixture
def job(corpus, tmp_path):
    """Start the driver of a run on two nodes of one rank, as Ray's job server would; it starts a local Ray."""
    save_config(config_of(corpus, failover={"restarts": 0}, train={"device": "cpu"},
                          testing={"min_step_seconds": 0.3}), tmp_path / "run.toml")
    words = ("--config", tmp_path / "run.toml", "--run-folder", tmp_path / "run", "--nodes", "2",
             "--ranks-per-node", "1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.submit.ray_job", *map(str, words)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    return start


def ranks(folder) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or [])
            and "train" in each.info["cmdline"]]


def test_a_killed_rank_is_started_again_and_the_run_has_the_same_bits(job, tmp_path, undisturbed):
    folder = tmp_path / "run"
    driver = job()
    wait_for(lambda: driver.poll() is not None or logged(folder) >= 5)
    assert driver.poll() is None, driver.communicate()[0]
    first, _ = ranks(folder)
    first.kill()
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 0, said
    assert "attempt 1 ended with code -9; starting the ranks again" in said
    assert [event["step"] for event in read_events(folder) if event["event"] == "resumed"] == [4]
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])


def test_a_job_that_is_stopped_is_saved_and_the_next_one_resumes(job, tmp_path, undisturbed):
    folder = tmp_path / "run"
    driver = job()
    wait_for(lambda: driver.poll() is not None or logged(folder) >= 2)
    driver.send_signal(signal.SIGTERM)
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == PREEMPTED, said
    assert max(checkpoints(folder)) == logged(folder) < STEPS and not ranks(folder)
    again = job()
    said = again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
