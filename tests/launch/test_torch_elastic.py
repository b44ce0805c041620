"""Under torch elastic a run goes on by itself, with real agents: on as many ranks, and on fewer."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.launch import torch_elastic
from shoal.launch.checks import memory
from shoal.launch.checks.memory import count_rank_memory
from shoal.launch.rank_env import RankEnv
from shoal.launch.torch_elastic import OWN_STORE, adapt_to_ranks, check_elastic, idle, should_resume
from shoal.spec.config import build_config, save_config
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from tests.trainings.forked import Command
from tests.trainings.runs import alive, checkpoints, curve, logged, same_bits, shoal, start, wait_for
from tests.trainings.supervised import STEPS, config_of

AGENT = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
FAULTY = "tests.trainings.faulty"


@pytest.fixture(autouse=True)
def one_store_a_round(monkeypatch):
    monkeypatch.setenv(OWN_STORE, "1")


@pytest.fixture
def file(corpus, tmp_path) -> Path:
    save_config(config_of(corpus, failover={"silence_seconds": 4, "stall_seconds": 4}), tmp_path / "run.toml")
    return tmp_path / "run.toml"


def test_lost_workers_are_restarted_and_nothing_is_lost(file, tmp_path, undisturbed, monkeypatch):
    """One is killed, one stopped, one hangs: its neighbour sees it, where torchrun would wait ten minutes."""
    monkeypatch.setenv("FAULT", "kill@5:1:B,stop@7:1:B,stall@9:0:F")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "run"
    code, said = shoal("train", file, "--run-folder", folder, agent=AGENT, module=FAULTY)
    assert code == 0, said
    assert [event["step"] for event in read_events(folder) if event["event"] == "resumed"] == [4, 4, 8]
    killed, stopped, stuck = [event for event in read_events(folder) if event["event"] == "failure"]
    assert (killed["rank"], killed["step"]) == (1, 4) and "exited without a traceback" in killed["how"]
    assert killed["where"].startswith("in step 5, backward")
    assert (stopped["rank"], stopped["step"]) == (1, 6) and "is stopped (SIGSTOP) since" in stopped["how"]
    assert (stuck["rank"], stuck["step"]) == (0, 8) and "is stuck since" in stuck["how"]
    assert all("faulty.py" in event["report"] for event in (stopped, stuck))
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert not list(tmp_path.glob("shoal-beats-*"))


def test_bad_input_is_not_tried_again(file, tmp_path, monkeypatch):
    """It is found in the fifth step, after a save: tried again, the run would have been resumed."""
    monkeypatch.setenv("FAULT", "usage@5:1:B")
    monkeypatch.setenv("FAULT_ALWAYS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, said = shoal("train", file, "--run-folder", tmp_path / "run", agent=(*AGENT[:-1], "1"), module=FAULTY)
    assert code == 1 and said.count("shoal: error: the planted fault") >= 2, said
    assert read_events(tmp_path / "run") == []


def test_a_restart_without_what_it_needs_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv(OWN_STORE, "1")
    check_elastic(tmp_path)
    with pytest.raises(UsageError, match="torchrun --max-restarts needs --run-folder"):
        check_elastic(None)
    monkeypatch.delenv(OWN_STORE)
    with pytest.raises(UsageError, match=f"Start it as: {OWN_STORE}=1 torchrun"):
        check_elastic(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_elastic(None)


class Nodes:
    """Two agents of one rank each; the store of their rendezvous is in one of them."""

    def __init__(self, file: Path, folder: Path):
        self.port = 29000 + os.getpid() % 1000
        self.agent = (
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "job", "--local-addr",
            "localhost", "--rdzv-conf",
            "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=6,join_timeout=120",
        )
        self.words, self.folder = ("train", file, "--run-folder", folder), folder
        self.agents: list[Command] = []

    def start(self, *more: str) -> list[Command]:
        self.agents += (new := [start(*self.words, *more, agent=self.agent) for _ in range(2)])
        return new

    def wait_for_step(self, step: int) -> None:
        """Wait until both run and that step is logged. One may begin alone, and then starts its worker again when the
        other comes."""

        def ready() -> bool:
            running = [agent for agent in self.agents if agent.poll() is None]
            assert running == self.agents, [agent.communicate()[0] for agent in self.agents if agent not in running]
            with suppress(psutil.NoSuchProcess):  # it ends just now
                return logged(self.folder) >= step and all(psutil.Process(each.pid).children() for each in running)
            return False

        wait_for(ready)

    def has_store(self, agent: Command) -> bool:
        ports = psutil.Process(agent.pid).net_connections()
        return any(c.status == "LISTEN" and c.laddr.port == self.port for c in ports)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.communicate()


def test_a_lost_node_leaves_a_run_on_the_others(file, tmp_path, undisturbed):
    """Its agent is killed, and its worker dies with it."""
    folder = tmp_path / "run"
    with Nodes(file, folder) as nodes:
        agents = nodes.start("--testing.min_step_seconds", "0.5")  # one that comes late still finds it
        nodes.wait_for_step(5)
        left, going = sorted(agents, key=nodes.has_store, reverse=True)
        worker = psutil.Process(going.pid).children(recursive=True)
        going.kill()
        said = left.communicate(timeout=120)[0]
        assert left.returncode == 0, said
        wait_for(lambda: not any(alive(one) for one in worker), 5)
    assert "1 of 2 ranks available: now on one device" in said
    last = [event for event in read_events(folder) if event["event"] == "resumed"][-1]
    assert (last["ranks"], last["layout"]) == (1, "one device")
    failures = [event["how"] for event in read_events(folder) if event["event"] == "failure"]
    assert any(how.startswith("left no record") for how in failures)
    for (_, loss, norm), (_, same_loss, same_norm) in zip(curve(folder), curve(undisturbed), strict=True):
        assert loss == pytest.approx(same_loss, rel=2e-5) and norm == pytest.approx(same_norm, rel=4e-4)


def test_an_agent_that_is_asked_to_stop_leaves_a_saved_run(file, tmp_path, undisturbed):
    """torchrun ends with 1 whatever its workers say, and passes SIGUSR1 on only if it is told to."""
    folder = tmp_path / "run"
    words = (*AGENT, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    agent = start("train", file, "--run-folder", folder, "--testing.min_step_seconds", "0.3", agent=words)
    wait_for(lambda: agent.poll() is not None or logged(folder) >= 5)
    agent.send_signal(signal.SIGUSR1)
    said = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1 and f"stopped after step {logged(folder)}, which is saved" in said
    assert max(checkpoints(folder)) == logged(folder) < STEPS
    code, said = shoal("train", file, "--run-folder", folder, "--auto-resume")  # as any start of it does
    assert code == 0, said
    assert curve(folder) == curve(undisturbed)


# ---- without processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("auto_resume", "environment", "expected"), [
    (True, {}, True), (False, {}, False), (False, {"SLURM_RESTART_COUNT": "1"}, True),
    (False, {"SLURM_RESTART_COUNT": "0"}, False), (False, {"TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    (False, {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
])
def test_who_starts_again_goes_on(auto_resume, environment, expected, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not should_resume(tmp_path, auto_resume)  # there is no run yet
    (tmp_path / "run.toml").touch()
    assert should_resume(tmp_path, auto_resume) is expected
    assert not should_resume(None, auto_resume)


def test_fewer_ranks_take_the_nearest_layout_only_where_somebody_starts_them_again(monkeypatch):
    config = build_config({"parallel": {"dp": 4}, "train": {"global_batch": 8}})
    shape, member = check(config), RankEnv(2, 3, 2, 3, "torchrun", ("localhost", 1))
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert adapt_to_ranks(config, shape, member) is config
    assert adapt_to_ranks(config, shape, member, auto_resume=True).parallel.dp == 2
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert adapt_to_ranks(config, shape, member).parallel.dp == 2  # the third rank has nothing to do
    fixed = build_config({"parallel": {"dp": 4}, "train": {"global_batch": 8}, "failover": {"replan": False}})
    assert adapt_to_ranks(fixed, shape, member) is fixed


def test_fewer_ranks_take_a_layout_that_memory_holds(monkeypatch):
    config = build_config({"parallel": {"dp": 4}, "train": {"global_batch": 8}})
    shape, member = check(config), RankEnv(1, 2, 1, 2, "slurm", ("localhost", 1))
    nearest = adapt_to_ranks(config, shape, member, auto_resume=True)
    assert nearest.parallel.dp == 2
    needed = 2 * count_rank_memory(nearest, shape, torch.device("cpu"))[0].total
    monkeypatch.setattr(memory, "host_memory", lambda: needed - 1)
    assert adapt_to_ranks(config, shape, member, auto_resume=True).parallel.dp == 1


def test_fewer_ranks_take_a_layout_that_can_be_trained(monkeypatch):
    config = build_config({"parallel": {"dp": 4}, "train": {"global_batch": 8}})
    shape, member = check(config), RankEnv(1, 3, 1, 3, "slurm", ("localhost", 1))

    def no_two(changed):
        if changed.parallel.dp == 2:
            raise UsageError("not on two")
        return check(changed)

    monkeypatch.setattr(torch_elastic, "check", no_two)
    assert adapt_to_ranks(config, shape, member, auto_resume=True).parallel.dp == 1


def test_a_job_that_is_started_again_begins_or_goes_on(file, tmp_path, undisturbed):
    """As Kubernetes does with a pod: SIGTERM, and later the same command."""
    words = ("train", file, "--run-folder", tmp_path / "run", "--auto-resume")
    dying = ("--failover.restarts", "0", "--testing.kill", "0@1")
    assert shoal(*words, *dying)[0] == 128 + signal.SIGKILL  # and nothing is saved yet
    process = start(*words, "--testing.min_step_seconds", "0.3")
    wait_for(lambda: process.poll() is not None or logged(tmp_path / "run") >= 3)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert shoal(*words)[0] == 0
    assert same_bits(checkpoints(tmp_path / "run")[STEPS], checkpoints(undisturbed)[STEPS])
    code, said = shoal(*words)  # a run that is done stays done
    assert code == 0 and f"resumed after step {STEPS}" in said
    assert shoal("train", file, "--auto-resume")[0] == 2


def test_a_rank_without_work_waits_for_the_others():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    codes = []
    member = RankEnv(1, 2, 1, 2, "torchrun", ("localhost", store.port))
    rank = Thread(target=lambda: codes.append(idle(member)))
    rank.start()
    rank.join(1)
    assert rank.is_alive()
    del store
    rank.join(30)
    assert codes == [0]
