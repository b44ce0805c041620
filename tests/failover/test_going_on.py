"""A run that dies goes on from memory, as if nothing had been."""

import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shoal.comm.pool import RankError
from shoal.config import plain, save
from shoal.failover.host import home
from shoal.layout import Layout
from shoal.train import trainer
from tests.train.runs import (
    FOUR_RANKS,
    checkpoints,
    curve,
    interrupt,
    same_bits,
    send,
    shoal,
    small_config,
    start,
    train_here,
    train_in,
)

DEATH, EVERY, STEPS = 10, 3, 14


class Dies(trainer.Trainer):
    """Loses a rank after a step, when it has kept what it keeps of it."""

    def _after_step(self, *args: Any, **options: Any) -> None:
        super()._after_step(*args, **options)
        if self.step == DEATH:
            if self.memory:
                self.memory.wait()
            raise RuntimeError(f"rank {dist.get_rank()} is lost")


def train_until_death(values: dict[str, Any], folder: Path) -> None:
    with mock.patch("tests.train.runs.Trainer", Dies):
        train_here(values, folder, False)


def resume(values: dict[str, Any], folder: Path) -> str:
    """Train to the end; returns where it went on from."""
    found: list[str] = []

    class Tells(trainer.Trainer):
        def run(self) -> None:
            found.append(f"step {self.step}, {self.source}")
            super().run()

    with mock.patch("tests.train.runs.Trainer", Tells):
        train_here(values, folder, True)
    return found[0]


@pytest.fixture(scope="module")
def whole(corpus, pool, tmp_path_factory):
    """14 steps of an undisturbed run on 4 ranks of 2 imagined nodes; the state is in memory every 3."""
    memory = tmp_path_factory.mktemp("memory")
    config = small_config(
        corpus, FOUR_RANKS, train={"steps": STEPS, "validate_every": 0}, checkpoint={"every": 8},
        failover={"memory_every": EVERY, "memory_folder": str(memory), "node_ranks": 2},
    )
    folder = train_in(pool, config, tmp_path_factory.mktemp("whole") / "run")
    assert not list(memory.iterdir())  # given back
    return config, folder


def die(config, folder, pool) -> Path:
    """The same run, until rank after rank is lost after step 10: memory has step 9, the disk step 8."""
    folder.mkdir()
    save(config, folder / "run.toml")
    with pytest.raises(RankError, match="is lost"):
        pool.run(train_until_death, 4, plain(config), folder)
    return home(folder, config.failover)


@pytest.mark.parametrize("lost", ["no node", "node 0", "node 1", "both nodes"])
def test_the_same_layout_goes_on_bit_for_bit(lost, whole, pool, tmp_path):
    config, undisturbed = whole
    folder = tmp_path / "run"
    memory = die(config, folder, pool)
    for node in {"no node": (), "node 0": (0,), "node 1": (1,), "both nodes": (0, 1)}[lost]:
        shutil.rmtree(memory / f"node-{node:05d}")
    source = pool.run(resume, 4, plain(config), folder)[0]
    assert source.startswith("step 8, from /" if lost == "both nodes" else "step 9, from memory")
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert not memory.exists()


@pytest.mark.parametrize(
    "parallel", [{"micro_batch": 2}, {"pp": 2, "micro_batch": 2}, {"dp": 4, "zero": 3, "micro_batch": 1}]
)
def test_another_layout_goes_on_with_the_same_curve(parallel, whole, pool, tmp_path):
    config, undisturbed = whole
    folder = tmp_path / "run"
    memory = die(config, folder, pool)
    shutil.rmtree(memory / "node-00001")
    changed = config.model_copy(update={"parallel": Layout(**parallel)})
    assert pool.run(resume, changed.parallel.world_size, plain(changed), folder)[0] == "step 9, from memory"
    assert curve(folder)[:9] == curve(undisturbed)[:9]
    for (step, loss, _), (same_step, same_loss, _) in zip(curve(folder), curve(undisturbed), strict=True):
        assert step == same_step and loss == pytest.approx(same_loss, rel=2e-5, abs=0)


def test_killed_by_the_command_line_and_resumed_by_hand(corpus, tmp_path):
    """No checkpoint is on the disk yet, and less than a step is lost."""
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 2}, train={"steps": 2000, "validate_every": 0},
        checkpoint={"every": 0}, failover={"memory_every": 1, "memory_folder": str(tmp_path)},
    )
    save(config, tmp_path / "small.toml")
    folder = tmp_path / "run"
    interrupt(start("train", tmp_path / "small.toml", "--run-folder", folder), folder, 6, send(0, signal.SIGKILL))
    before, memory = curve(folder), home(folder, config.failover)
    assert memory.exists() and not checkpoints(folder)
    code, output = shoal("train", "--resume", folder, "--train.steps", str(before[-1][0] + 6))
    assert code == 0, output
    (words,) = [line for line in output.splitlines() if "resumed after step" in line]
    assert "from memory" in words and int(words.split("step ")[1].split(",")[0]) >= before[-1][0] - 2
    after = curve(folder)
    assert [step for step, _, _ in after] == list(range(1, before[-1][0] + 7))
    assert after[: len(before) - 2] == before[:-2]
    assert not memory.exists()
