"""Ranks that are forks: they must be what a fresh interpreter would be, and end as one would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from shoal.launch import prefork, worker_pool
from shoal.launch.forked_process import ForkedProcess
from shoal.launch.local_launcher import PRELOADED
from shoal.launch.prefork import Child, PreforkServer, PreforkServerEnded
from tests.trainings.runs import ROOT, alive, wait_for

RANK = """
import atexit, json, os, signal, sys, threading, time
from pathlib import Path
import torch
if __name__ == "__main__":
    act = os.environ["ACT"]
    print("said aloud", act, flush=True)
    atexit.register(print, "said last", act)
    print("said aside", act, file=sys.stderr, flush=True)
    Path(os.environ["REPORT"]).write_text(json.dumps({
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv, "name": __name__,
        "threads": threading.active_count(), "kernel threads": len(os.listdir("/proc/self/task")),
        "torch threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"], "home": "HOME" in os.environ,
        "handlers": [signal.getsignal(s) is signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)],
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}")),
        "loaded": [name in sys.modules for name in ("torch._dynamo", "torch.utils.tensorboard")],
        "sum": float(torch.ones(1000).sum()),
    }))
    if act == "sleep":
        time.sleep(1000)
    if act == "raise":
        raise ArithmeticError("a rank's own")
    sys.exit(int(act))
"""


def write_rank(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    (folder / "forked.py").write_text(RANK)
    patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    patch.syspath_prepend(str(folder))  # of a server that is a fork of this process
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    return write_rank(tmp_path, monkeypatch)


def started(here: Path, preload: Sequence[str] = PRELOADED, **more: bool) -> PreforkServer:
    return PreforkServer({**os.environ, "OMP_NUM_THREADS": "1"}, here / "prefork.log", preload, **more)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Iterator[PreforkServer]:
    """One server for all tests that do not end it. It has imported what its ranks import, and no more."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch, started(write_rank(folder, patch), ("torch",)) as server:
        yield server


@pytest.fixture
def mortal(here) -> Iterator[PreforkServer]:
    """Without what ranks import, which is nothing to its end."""
    with started(here, ()) as server:
        yield server


def fork(server: PreforkServer, here: Path, act: str, name: str = "rank", heard: bool = False) -> Child:
    environment = {"ACT": act, "REPORT": str(here / f"{name}.json"), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    return server.start("forked", environment, here / f"{name}.log", heard=heard)


def report(here: Path, name: str = "rank") -> dict:
    file = here / f"{name}.json"
    wait_for(lambda: file.exists() and file.read_text().endswith("}"))
    return json.loads(file.read_text())


def test_a_request_that_comes_before_a_fork_has_its_own_handlers_is_not_lost(own, here):
    """The server leaves such requests to the ranks, and the kernel throws away what a process ignores."""
    for number in range(10):
        child = fork(own, here, "sleep", f"stopped-{number}")
        os.kill(child.pid, signal.SIGTERM)
        wait_for(lambda child=child: child.poll() is not None, 30)
        assert child.returncode == -signal.SIGTERM


def test_a_fork_is_a_process_of_its_own(here, capfd):
    with started(here, ("torch",), may_fork=False) as own:  # here, since it inherits the stdout of now
        first, second = fork(own, here, "0", "first", heard=True), fork(own, here, "7", "second")
        assert (first.wait(), second.wait()) == (0, 7)
        assert fork(own, here, "raise").wait() == 1
        assert len(os.listdir(f"/proc/{own.pid}/task")) == 1  # else a fork would not be sound
        fork(own, here, "sleep", "left")
        left = psutil.Process(report(here, "left")["pid"])
    assert not psutil.pid_exists(own.pid)  # leaving ends everything
    wait_for(lambda: not alive(left), 5)
    said = report(here, "first")
    assert (said["pid"], said["parent"], said["session"]) == (first.pid, own.pid, first.pid)
    assert (said["argv"], said["name"], said["sum"]) == ([str(here / "forked.py")], "__main__", 1000.0)
    assert said["threads"] == said["kernel threads"] == said["torch threads"] == 1
    assert said["loaded"] == [False, False]  # but what it was told to import
    assert not said["home"]  # its environment is what was given, no more
    assert said["handlers"] == [True] * 3
    assert not any("socket" in file for file in said["fds"])  # it cannot speak as the server
    assert capfd.readouterr().out == "said aloud 0\nsaid last 0\n"
    assert (here / "first.log").read_text() == "said aside 0\n"
    assert sorted((here / "second.log").read_text().splitlines()) == ["said aloud 7", "said aside 7", "said last 7"]
    assert "ArithmeticError: a rank's own" in (here / "rank.log").read_text()
    assert (here / "prefork.log").read_text() == ""


def test_signals_to_all_processes_of_a_job_leave_the_server(own, here):
    rank = fork(own, here, "sleep")
    report(here)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(own.pid, signum)
    time.sleep(0.2)
    assert rank.poll() is None and not own.ended
    rank.send_signal(signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM
    rank.send_signal(signal.SIGTERM)  # nothing is sent to one that has ended


def test_a_killed_server_takes_its_ranks_along_and_says_so(mortal, here):
    rank = fork(mortal, here, "sleep")
    process = psutil.Process(report(here)["pid"])
    os.kill(mortal.pid, signal.SIGKILL)
    assert rank.wait() == -signal.SIGKILL
    wait_for(lambda: not alive(process), 5)
    with pytest.raises(PreforkServerEnded, match="has ended"):
        fork(mortal, here, "0")


def test_a_server_that_is_stopped_is_killed_and_its_ranks_with_it(mortal, here, monkeypatch, capfd):
    monkeypatch.setattr(prefork, "ANSWER_SECONDS", 0.4)
    rank = fork(mortal, here, "sleep")
    process = psutil.Process(report(here)["pid"])
    os.kill(mortal.pid, signal.SIGSTOP)
    assert rank.wait() == -signal.SIGKILL and mortal.ended
    assert "does not answer; it is killed" in capfd.readouterr().err
    wait_for(lambda: not alive(process), 5)


def test_a_server_that_dies_while_it_imports_is_told_at_once(here):
    """Its end must be known when the next one is started: the kernel closes the connection before it is reaped."""
    with started(here) as own:
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(PreforkServerEnded):
            fork(own, here, "0")
        assert own.ended


FORKING = """
import importlib, os, sys, torch
from pathlib import Path
cuda = torch.cuda.__dict__.copy()
torch.cuda._is_compiled, torch._C._cuda_getCurrentRawStream = lambda: True, None
for name in ("is_available", "device_count", "current_device", "_lazy_init", "get_device_capability"):
    def touch(*args, name=name):
        raise SystemExit(f"torch.cuda.{name} is called by an import")
    setattr(torch.cuda, name, touch)
from shoal.launch.local_launcher import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import model_shape
with torch.device("meta"):
    Transformer(model_shape("tiny-gpt"))
if "torch._dynamo" in sys.modules:
    raise SystemExit("a process that compiles nothing imports the compiler")
if "torch.utils.tensorboard" not in sys.modules:
    raise SystemExit("each rank imports TensorBoard again")
for name in sys.argv[1:]:
    importlib.import_module(name)
torch.cuda.__dict__.update(cuda)
from shoal.launch.prefork import PreforkServer
end = os.open("registered", os.O_CREAT | os.O_WRONLY)  # no buffer, which forks would share
import atexit
atexit.register(os.write, end, b"once ")
with PreforkServer(os.environ, preload=["shoal.training.trainer"]) as server:
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert command == Path("/proc/self/cmdline").read_bytes(), command  # no second interpreter
    children = [server.start("forked", {**os.environ, "ACT": act, "REPORT": f"{act}.json"}, Path(f"{act}.log"))
                for act in ("0", "7", "raise")]
    assert [child.wait() for child in children] == [0, 7, 1]
"""


def test_a_process_of_one_thread_forks_its_server_and_imports_touch_no_device(here, monkeypatch):
    """A fork of a process that has used CUDA cannot use it."""
    ours = {name for name in worker_pool.PRELOADED if name.startswith("shoal.")}
    modules = {*ours, "shoal.launch.worker", "shoal.testing.verify.rank"}
    monkeypatch.chdir(here)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORKING, *modules], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    assert "ArithmeticError: a rank's own" in (here / "raise.log").read_text()
    assert (here / "registered").read_text() == "once "  # not by the forks
    said = report(here, "7")
    assert (said["name"], said["sum"], said["handlers"]) == ("__main__", 1000.0, [True] * 3)
    assert not any("socket" in file for file in said["fds"])


def test_what_it_cannot_import_is_in_its_log(here, monkeypatch):
    (here / "shoal").mkdir()  # hides the real one
    (here / "shoal" / "__init__.py").write_text("raise ImportError('no shoal here')")
    monkeypatch.chdir(here)
    with (
        PreforkServer({**os.environ}, here / "prefork.log", may_fork=False) as server,
        pytest.raises(PreforkServerEnded),
    ):
        fork(server, here, "0")
    assert "no shoal here" in (here / "prefork.log").read_text()


def test_an_order_that_is_interrupted_ends_the_server(here, monkeypatch):
    """Its answer, which is still to come, must not be taken for that to the next order."""
    with started(here) as own:
        monkeypatch.setattr(own, "listen", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fork(own, here, "0")
        wait_for(lambda: own.ended, 5)


def test_a_fork_that_the_kernel_has_reaped_has_ended(monkeypatch):
    """A process manager may start shoal with SIGCHLD ignored."""
    monkeypatch.setattr(os, "waitpid", Mock(side_effect=ChildProcessError))
    fork = ForkedProcess.__new__(ForkedProcess)
    fork.pid, fork.returncode = 1, None
    assert fork.poll() == 0 and fork.wait() == 0
    fork.kill()


def test_a_fork_finds_out_itself_whether_its_output_can_seek(tmp_path: Path) -> None:
    code = (
        "import os, sys; from shoal.launch.forked_process import ForkedProcess; os.dup2(os.pipe()[1], 1)\n"
        "def run():\n  assert sys.stdout.write_through\n  sys.stdout.reconfigure(errors='replace')\n"
        "sys.exit(ForkedProcess(run).wait())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "out").open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, env=environment, check=True)
