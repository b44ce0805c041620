"""Tasks of a SLURM step, as srun would start them: warned while they start, and started again as fewer than before."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from shoal.spec.config import save_config
from shoal.training.stop import PREEMPTED
from tests.trainings.runs import checkpoints, curve, logged, same_bits, start, wait_for
from tests.trainings.supervised import STEPS, config_of


@pytest.fixture
def step(monkeypatch, corpus, tmp_path):
    """Start one of so many tasks, of a run whose layout is for four."""
    save_config(config_of(corpus, failover={"restarts": 0}), tmp_path / "run.toml")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ("train", tmp_path / "run.toml", "--run-folder", tmp_path / "run", "--parallel.dp", "4")
    job = {"JOB_ID": os.getpid(), "NODEID": 0, "STEP_NODELIST": "localhost"}

    def task(rank: int, tasks: int, *more: str, **variables: int):
        place = {"PROCID": rank, "LOCALID": rank, "NTASKS": tasks, "STEP_TASKS_PER_NODE": tasks}
        for name, value in {**job, **place, **variables}.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        return start(*words, *more)

    return task


def listens(pid: int) -> bool:
    return any(c.status == "LISTEN" for c in psutil.Process(pid).net_connections())


def test_a_warning_at_the_start_is_heard_and_fewer_tasks_go_on(step, tmp_path, undisturbed):
    """Four ranks are wanted: of three one has no work; the job is requeued, and gets two."""
    folder: Path = tmp_path / "run"
    first = step(0, 3, "--auto-resume", STEP_ID=0)
    wait_for(lambda: first.poll() is not None or listens(first.pid))
    first.send_signal(signal.SIGUSR1)  # while it waits for the others
    tasks = [first, *(step(rank, 3, "--auto-resume", STEP_ID=0) for rank in (1, 2))]
    said = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [PREEMPTED, 0, 0], said
    assert "3 of 4 ranks available: now on dp 2" in said[0]
    assert logged(folder) == 1 and list(checkpoints(folder)) == [1]
    tasks = [step(rank, 2, STEP_ID=1, RESTART_COUNT=1) for rank in (0, 1)]
    said = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])


def test_fewer_tasks_that_nobody_starts_again_are_refused(step):
    code = (task := step(0, 2, STEP_ID=2)).wait(60)
    assert code == 2 and "dp 4" in task.communicate()[0]
