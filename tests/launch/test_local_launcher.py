"""Launching, through real processes: the cause of a death, no orphans, a clean stop, joining torchrun and SLURM."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.device import allocator_environment
from shoal.launch.local_launcher import RankProcesses, start_rank_server
from shoal.launch.prefork import PreforkServer, local_environment
from shoal.launch.rank_env import RankEnv, _expand_counts, _first_host, detect_rank_env
from shoal.launch.watch.rank_failure import Ending, Failure
from shoal.launch.watch.watchdog import Watchdog
from shoal.spec.config import FailoverConfig, build_config
from shoal.training.stop import TOGETHER_SECONDS, StopRequests
from tests.trainings.forked import ORDER, Command, command

ROOT = Path(__file__).parents[2]

@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.fixture
def server(rank_server) -> PreforkServer:
    return rank_server


def launch(server: PreforkServer, payload: dict[str, str], logs: Path) -> int:
    """Run the program on two ranks; the exit code."""
    logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, StopRequests() as stop:
        Path(scratch, "payload.json").write_text(json.dumps(payload))
        ranks = RankProcesses(logs, Path(scratch), "cpu", stop, server, FailoverConfig())
        ending = ranks.run("tests.launch.program", 2, {})
        ranks.print_cause(ending)
        return ending.code


def forked(server: PreforkServer, module: str, folder: Path, act: str, **environment: object) -> Command:
    """``python -m MODULE`` as a process of its own, and for the parent of ranks also its server, without imports."""
    payload = json.dumps({"folder": str(folder), "act": act})
    given = {"OMP_WAIT_POLICY": "passive"} | {name: str(value) for name, value in environment.items()}
    log = Path(tempfile.mkstemp(dir=folder, suffix=".log")[1])
    return Command(server.start(module, {**os.environ, "PAYLOAD": payload, **given}, log, heard=False), log)


def reports(folder: Path, ranks: int = 2, seconds: float = 60) -> list[dict]:
    """What each rank wrote, once all have."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(file.exists() and file.read_text().endswith("}") for file in files):
            return [json.loads(file.read_text()) for file in files]
        time.sleep(0.02)
    raise TimeoutError([log.read_text() for log in folder.glob("logs/*")])


def all_gone(pids: list[int], seconds: float = 5) -> bool:
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, timeout=seconds)[1]


def test_ranks_meet_and_finish(folder, capfd):
    config = build_config({"parallel": {"dp": 2}})
    with start_rank_server(config, "cpu") as server:  # here, since its stdout is that of now
        assert launch(server, {"folder": str(folder), "act": "finish"}, folder / "logs") == 0
    for rank, report in enumerate(reports(folder)):
        assert (report["rank"], report["world_size"], report["how"], report["total"]) == (rank, 2, "local", 2.0)
        assert report["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert capfd.readouterr().out == "rank 0 is heard\n"


@pytest.mark.parametrize("act, code, said", [
    ("raise", 1, "rank 1 exited with code 1; the other ranks were stopped"),
    ("die", 128 + signal.SIGKILL, "rank 1 was killed by SIGKILL; the other ranks were stopped"),
    ("die slowly", 128 + signal.SIGKILL, "rank 1 was killed by SIGKILL; the other ranks were stopped"),
])
def test_a_death_takes_all_down_and_shows_one_cause(folder, server, capfd, act, code, said):
    start = time.monotonic()
    assert launch(server, {"folder": str(folder), "act": act}, folder / "logs") == code
    assert time.monotonic() - start < 30  # far below the 60 s that the peer's collective would wait
    assert all_gone([report["pid"] for report in reports(folder)], seconds=0)
    shown = capfd.readouterr().err
    assert said in shown
    if act == "raise":
        assert "program.py" in shown and "ArithmeticError: the real cause" in shown
    assert shown.count("Traceback") == (1 if act == "raise" else 0)  # the peer's own error is in its log alone


@given(st.permutations([-signal.SIGKILL, 1, 1, -signal.SIGABRT]), st.randoms())
def test_the_cause_is_found_among_its_consequences(codes, random):
    """One rank was killed, two recorded broken connections and a library aborted, all before the parent looked."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = RankProcesses(Path(folder), Path(folder), "cpu", StopRequests(), Mock(), FailoverConfig())
        ranks.watchdog = Watchdog(FailoverConfig())
        for rank, code in enumerate(codes):
            ended = Mock(return_value=code)
            ranks.processes.append(Mock(returncode=code, poll=ended, wait=ended, pid=0))
            Path(folder, f"rank-{rank}.log").touch()
            if code == 1:
                Path(folder, f"failure-{rank}.json").write_text(json.dumps({"when": random.random(), "report": "lost"}))
        ending = ranks._watch()
        assert ending.code == 128 + signal.SIGKILL and codes[ending.cause.rank] == -signal.SIGKILL


def test_a_rank_that_cannot_be_started_has_no_log_and_its_cause_is_shown(tmp_path, capfd):
    server = Mock(start=Mock(side_effect=OSError("cannot create another process: try again")))
    ranks = RankProcesses(tmp_path / "gone", tmp_path, "cpu", StopRequests(), server, FailoverConfig())
    ranks.print_cause(ranks.run("program", 2, {}))
    shown = capfd.readouterr().err
    assert "rank 0 could not be started" in shown and "cannot create another process" in shown


@pytest.mark.parametrize("asked, code, trouble, told", [
    (1, -signal.SIGTERM, "", False),  # by our first signal
    (1, -signal.SIGKILL, "", True),  # by the system, while it saved
    (1, -signal.SIGKILL, "made no progress since 20 s and was ended,", True),
    (2, -signal.SIGKILL, "", False),  # by our second signal
    (2, -signal.SIGKILL, "made no progress since 20 s and was ended,", True),
])
def test_an_end_that_nobody_asked_for_is_told_also_during_a_stop(tmp_path, capfd, asked, code, trouble, told):
    stop = StopRequests()
    stop.count = asked
    ranks = RankProcesses(tmp_path, tmp_path, "cpu", stop, Mock(), FailoverConfig())
    ranks.print_cause(Ending(128 - code, Failure(0, code, trouble=trouble), 3))
    assert capfd.readouterr().err.startswith("rank 0") == told


def test_a_stop_before_any_rank_starts_is_no_success(tmp_path):
    stop, server = StopRequests(), Mock()
    stop.count = 1
    ending = RankProcesses(tmp_path, tmp_path, "cpu", stop, server, FailoverConfig()).run("program", 2, {})
    assert ending == Ending(128 + signal.SIGTERM, None, -1)
    server.start.assert_not_called()


def test_a_log_goes_on_where_the_last_launch_died(folder, server, capfd):
    for act in ("raise", "die"):
        launch(server, {"folder": str(folder), "act": act}, folder / "logs")
    log = (folder / "logs" / "rank-1.log").read_text()
    assert len(re.findall(r"^---- started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d by process \d+ ----$", log, re.M)) == 2
    assert "the real cause" in log
    shown = capfd.readouterr().err
    assert "the real cause" not in shown[shown.index("was killed by SIGKILL"):]  # that is what the first launch said


def test_a_usage_error_passes_through_without_traceback(folder, server, capfd):
    assert launch(server, {"folder": str(folder), "act": "usage"}, folder / "logs") == 2
    assert capfd.readouterr().err == "shoal: error: steps = -1; allowed: 1 or more\n"


def test_a_killed_parent_leaves_no_orphan(folder, server):
    parent = forked(server, "tests.launch.parent", folder, "sleep")
    pids = [report["pid"] for report in reports(folder)]
    parent.kill()
    parent.wait(10)
    assert all_gone(pids)


def test_a_request_to_stop_reaches_each_rank_once(folder, server):
    parent = forked(server, "tests.launch.parent", folder, "stop")
    reports(folder)
    os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    assert parent.wait(30) == 0
    assert parent.communicate()[0] == "rank 0 is heard\n"
    for rank in range(2):
        assert json.loads((folder / f"signals-{rank}.json").read_text()) == ["SIGTERM"]


def test_the_second_request_kills(folder, server):
    parent = forked(server, "tests.launch.parent", folder, "stop")
    pids = [report["pid"] for report in reports(folder)]
    parent.send_signal(signal.SIGINT)
    time.sleep(TOGETHER_SECONDS + 0.1)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(10) == 128 + signal.SIGKILL
    assert all_gone(pids, seconds=0)
    assert parent.communicate()[0].startswith("asked twice to stop: the ranks are killed")


def test_a_signal_to_a_process_and_to_its_group_is_one_request(monkeypatch):
    """`timeout` sends both, microseconds apart: counted as two, they killed the run in place of saving it."""
    now = iter((0.0, 0.001, 0.3, 0.4, 9.0))
    monkeypatch.setattr("shoal.training.stop.time.monotonic", lambda: next(now))
    with StopRequests() as stop:
        counts = []
        for _ in range(4):
            signal.raise_signal(signal.SIGTERM)
            counts.append(stop.count)
    assert counts == [1, 1, 2, 2]


def test_torchrun_joins(folder, server):
    """Its agent and workers are forks; in `tests.cli.run.test_train` they are interpreters of their own."""
    agent = ("--standalone", "--nproc-per-node", "2")
    order = json.dumps({"words": ["-m", "tests.launch.program"], "cwd": str(folder), "agent": agent})
    run = forked(server, "tests.trainings.forked", folder, "finish", **{ORDER: order})
    assert run.wait(60) == 0, run.communicate()[0]
    assert [(r["rank"], r["local_world_size"], r["how"], r["total"]) for r in reports(folder)] == [
        (0, 2, "torchrun", 2.0), (1, 2, "torchrun", 2.0)]


def test_slurm_joins(folder, server):
    def task(rank: int) -> Command:
        variables = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
                     "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": 1234567}
        return forked(server, "tests.launch.program", folder, "finish", **variables)

    for process in [task(0), task(1)]:
        assert process.wait(60) == 0, process.communicate()[0]
    assert [(r["rank"], r["local_rank"], r["how"], r["total"]) for r in reports(folder)] == [
        (0, 0, "slurm", 2.0), (1, 1, "slurm", 2.0)]


def clear(monkeypatch) -> None:
    for name in list(os.environ):
        if re.match("SLURM_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_", name):
            monkeypatch.delenv(name)


def test_started_plainly_nothing_is_joined(monkeypatch):
    clear(monkeypatch)
    assert detect_rank_env() is None
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "9"}.items():
        monkeypatch.setenv(name, value)  # inside an sbatch script, but not by srun
    assert detect_rank_env() is None


def test_slurm_on_several_nodes(monkeypatch):
    clear(monkeypatch)
    for name, value in {"SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "3",
                        "SLURM_STEP_NODELIST": "gpu[007-009,12]", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
                        "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert detect_rank_env() == RankEnv(6, 7, 0, 1, "slurm", ("gpu007", 20036))


def test_a_slurm_task_bound_to_one_gpu_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = {"rank": 3, "world_size": 4, "local_rank": 3, "local_world_size": 4}
    assert RankEnv(**place, how="slurm").device("cuda") == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="local rank 3 has no CUDA device"):
        RankEnv(**place, how="torchrun").device("cuda")


@pytest.mark.parametrize("nodes, first", [
    ("a1", "a1"), ("a1,b2", "a1"), ("gpu[007-009,12],login", "gpu007"), ("n[3,5]", "n3"), ("r[1-2]n[04-09],x", "r1n04"),
])
def test_first_host(nodes, first):
    assert _first_host(nodes) == first


def test_expand_counts():
    assert _expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert _expand_counts("8") == [8]


def test_half_a_torchrun_is_refused(monkeypatch):
    clear(monkeypatch)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"):
        detect_rank_env()
    monkeypatch.setenv("WORLD_SIZE", "two")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UsageError, match="WORLD_SIZE = 'two' is not a number"):
        detect_rank_env()


@pytest.mark.parametrize(("name", "value"), [("RANK", 2), ("RANK", -1), ("LOCAL_RANK", 1), ("MASTER_PORT", 65536)])
def test_a_place_that_there_is_not_is_refused(monkeypatch, name, value):
    clear(monkeypatch)
    there = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for variable, right in there.items():
        monkeypatch.setenv(variable, str(right))
    assert detect_rank_env().rank == 1
    monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=f"{name} = {value} is not one of 0 to"):
        detect_rank_env()


FAULTS = """
import ctypes, os, resource, sys

libc = ctypes.CDLL(None)
def allocate():  # as torch does
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(40 << 20)) == 0
    ctypes.memset(block, 0, 40 << 20)
    libc.free(block)

hows = sys.argv[1:] or os.environ["HOWS"].split()
if "torch" in hows:
    import torch
    from shoal.engine.device import tune_allocator
    allocate = lambda: torch.ones(10 << 20)  # 40 MiB, above any threshold that glibc would grow to

for how in hows:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    if how == "tuned":
        assert tune_allocator()
    # posix_memalign leaves splinters: a tuned heap grows a few times before it serves the same size
    first = 20 if how in ("tuned", "set") else 1
    for i in range(first + 5):
        if i == first:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        allocate()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="another C library than glibc")
def test_the_allocator_reuses_pages(tmp_path):
    def faults(environment: dict[str, str], how: str) -> int:
        """Return the page faults in a process that was started with these variables."""
        return int(subprocess.check_output([sys.executable, "-c", FAULTS, how], env={**os.environ, **environment}))

    (tmp_path / "faults.py").write_text(FAULTS)  # for a fork, which has imported torch
    forked = command([], {**os.environ, "HOWS": "torch tuned"}, tmp_path, script=str(tmp_path / "faults.py"))
    said = forked.communicate(60)[0]
    assert forked.returncode == 0, said
    plain, tuned = map(int, said.split())
    without, by_variables = faults({}, "plain"), faults(allocator_environment(), "set")
    assert plain > 1000 and without > 1000
    assert tuned < 250 and by_variables < 250


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_allocator_is_set_for_ranks_on_the_cpu_alone(device, monkeypatch):
    for name in allocator_environment():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert ("PYTORCH_ALLOC_CONF" in local_environment(1, device)) == (device == "cuda")
    found = local_environment(1, device).keys() & allocator_environment().keys()
    assert found == (allocator_environment().keys() if device == "cpu" else set())


def test_the_server_imports_what_building_torchs_optimizers_would_import_in_each_rank(monkeypatch):
    """Its compiler: 1.5 s of CPU of each new rank, also in a recovery."""
    asked = Mock()
    monkeypatch.setattr("shoal.launch.local_launcher.PreforkServer", asked)
    start_rank_server(build_config({}), "cpu")
    assert "torch._dynamo" in asked.call_args.kwargs["preload"]
