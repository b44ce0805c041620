"""The records of ranks that somebody else started: whose they are, and who removes them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shoal.launch.rank_env import RankEnv
from shoal.launch.watch.peer_watch import LEFT_SECONDS, make_shared_folder
from shoal.training.resilience.heartbeat import Heartbeat, record_path

LONG = 2 * LEFT_SECONDS
MEMBER = RankEnv(0, 2, 0, 2, "torchrun", ("localhost", 29400))


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folder_of(temporary: Path, name: str, pid: int | None, silent: float, age: float = LONG) -> None:
    """The folder of another job, with the record of one process."""
    folder = temporary / f"shoal-beats-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700)
    if pid is not None:
        record = Heartbeat(None)
        record._record.pid, record._record.alive = pid, time.monotonic() - silent
        record_path(folder, 0).write_bytes(bytes(record._map))
    os.utime(folder, (time.time() - age, time.time() - age))


def test_what_dead_jobs_left_is_removed_and_nothing_else(temporary):
    dead = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    folder_of(temporary, "dead-29400-0", dead, silent=LONG)
    folder_of(temporary, "rebooted-29400-0", dead, silent=-LONG)
    folder_of(temporary, "empty-29400-0", None, silent=0)
    kept = {
        "stopped-29400-0": (os.getpid(), LONG, LONG), "container-29400-0": (dead, 1, LONG),
        "beginning-29400-0": (None, 0, 1), "new-29400-0": (dead, LONG, 1),
    }  # fmt: skip
    for name, (pid, silent, age) in kept.items():
        folder_of(temporary, name, pid, silent, age)
    (temporary / f"shoal-beats-{os.getuid() + 1}-theirs").mkdir()
    (temporary / f"shoal-beats-{os.getuid()}-1234-29400-0").mkdir(mode=0o755)
    mine = make_shared_folder(MEMBER, {"SLURM_JOB_ID": "77"})
    there = {path.name.split("-", 3)[-1] for path in temporary.iterdir()}
    assert mine.is_dir() and there == {*kept, "77-29400-0-2", "theirs", "1234-29400-0"}


def test_the_first_rank_of_a_host_alone_removes(temporary):
    folder_of(temporary, "empty-29400-0", None, silent=0)
    make_shared_folder(RankEnv(1, 2, 1, 2, "torchrun", ("localhost", 29400)), {})
    assert len(list(temporary.iterdir())) == 2


def test_an_earlier_round_of_the_same_job_is_removed_at_once(temporary):
    environment = {"SLURM_JOB_ID": "77"}
    first = make_shared_folder(MEMBER, environment)
    second = make_shared_folder(MEMBER, {**environment, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first != second and [*temporary.iterdir()] == [second]
