"""Supervised runs on two ranks, all forked from one server: none pays for its imports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.data.prepare import prepare
from shoal.launch.prefork import PreforkServer
from shoal.launch.supervisor import Supervisor
from shoal.spec.config import RunConfig
from shoal.training.run_folder import new_run
from tests.trainings.forked import server
from tests.trainings.runs import small_config

STEPS = 10


def config_of(corpus: Path, **sections: dict[str, Any]) -> RunConfig:
    """10 steps of one layer on two replicas, a checkpoint every 4."""
    values = {
        "model": {"layers": 1},
        "train": {"steps": STEPS, "global_batch": 4, "validate_every": 0},
        "failover": {"restarts": 2, "heartbeat_timeout_seconds": 3, "progress_timeout_seconds": 3},
        "checkpoint": {"every": 4, "asynchronous": False},  # which one is the newest must not depend on how fast it is
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    parallel = {"dp": 2, "zero": 1, "micro_batch": 1} | values.pop("parallel", {})
    return small_config(corpus, parallel, **values)


@pytest.fixture(scope="session")
def rank_server() -> PreforkServer:
    """With shoal and these tests on its path."""
    return server()


@pytest.fixture
def supervised(rank_server, tmp_path, monkeypatch) -> Callable[..., tuple[int, Path]]:
    """Train under a supervisor, with a fault or none; returns the exit code and the folder."""

    def train(config: RunConfig, fault: str = "", always: bool = False, name: str = "run") -> tuple[int, Path]:
        monkeypatch.setenv("FAULT", fault)
        if always:
            monkeypatch.setenv("FAULT_ALWAYS", "1")
        prepare(config.data)
        folder = new_run(config, tmp_path / name)
        supervisor = Supervisor(
            config, folder, "cpu", survivable=False, module="tests.trainings.faulty", server=rank_server
        )
        return supervisor.run(), folder

    return train


def train_undisturbed(config: RunConfig, folder: Path, server: PreforkServer) -> Path:
    """Train under a supervisor without a fault; returns the folder."""
    prepare(config.data)
    new_run(config, folder)
    assert Supervisor(config, folder, "cpu", survivable=False, server=server).run() == 0
    return folder


@pytest.fixture(scope="session")
def undisturbed(corpus, rank_server, tmp_path_factory) -> Path:
    """The folder of the same run without a fault."""
    return train_undisturbed(config_of(corpus), tmp_path_factory.mktemp("undisturbed") / "run", rank_server)
