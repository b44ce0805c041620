"""Ranks that somebody else started: whose their records are, who removes them, and who waits for a host in vain."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.launch.rank_env import RankEnv, stack_path
from shoal.launch.watch.peer_watch import LEFT_SECONDS, PATIENCE, PeerWatch, make_shared_folder
from shoal.launch.watch.watchdog import write_stack_when_asked
from shoal.launch.worker_pool import RankError
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.events import read_events
from shoal.training.resilience.heartbeat import Heartbeat, Phase, record_path

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


def test_what_dead_jobs_left_is_removed_and_nothing_else(temporary, monkeypatch):
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
    folder_of(temporary, "1234-29400-0", dead, silent=LONG)
    (temporary / f"shoal-beats-{os.getuid()}-1234-29400-0").chmod(0o755)  # anybody may have made the records in it
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    mine = make_shared_folder(MEMBER)
    there = {path.name.split("-", 3)[-1] for path in temporary.iterdir()}
    assert mine.is_dir() and there == {*kept, "77-29400-0-2", "theirs", "1234-29400-0"}
    mine.chmod(0o777)
    assert make_shared_folder(MEMBER) is None


def test_the_first_rank_of_a_host_alone_removes(temporary):
    folder_of(temporary, "empty-29400-0", None, silent=0)
    make_shared_folder(RankEnv(1, 2, 1, 2, "torchrun", ("localhost", 29400)))
    assert len(list(temporary.iterdir())) == 2


def test_an_earlier_round_of_the_same_job_is_removed_at_once(temporary, monkeypatch):
    first = make_shared_folder(MEMBER)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = make_shared_folder(MEMBER)
    assert first != second and [*temporary.iterdir()] == [second]


def wait_for_a_silent_host(folder: Path, seconds: float) -> None:
    """Receive, on rank 0, what the only rank of another host never sends."""
    if dist.get_rank() == 1:
        time.sleep(60)
    sys.stderr = open(folder / "said", "w")  # noqa: SIM115  # of a process that is killed
    beat = Heartbeat(record_path(folder, 0))
    write_stack_when_asked(stack_path(folder, 0))
    beat.begun(3)
    beat.phase(Phase.STEP)
    beat.stepped(4, seconds=0.1)
    limits = FailoverConfig(progress_timeout_seconds=seconds)
    PeerWatch(RankEnv(0, 2, 0, 1, "torchrun", ("localhost", 29400)), folder, limits, folder)
    dist.recv(torch.zeros(1), 1)


def test_a_rank_that_waits_for_a_silent_host_is_ended(pool, tmp_path):
    """A stage of a pipeline whose neighbour's host is gone, with open connections: gloo would wait ten minutes."""
    begin = time.monotonic()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        pool.run(wait_for_a_silent_host, 2, tmp_path, 1.0)
    assert time.monotonic() - begin > 1 + PATIENCE
    [failure] = [event for event in read_events(tmp_path) if event["event"] == "failure"]
    assert failure["rank"] == 0 and "waits for another host, whose ranks are silent" in failure["how"]
    assert "wait_for_a_silent_host" in failure["report"]
    assert (tmp_path / "said").read_text().startswith(f"rank 0 {failure['how']}")
