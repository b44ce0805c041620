"""A run that dies goes on from memory, as if nothing had been."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.launch.worker_pool import RankError
from shoal.spec.config import save_config
from shoal.spec.layout import Layout
from shoal.training.resilience.host_memory_dir import run_dir
from tests.trainings.failing import Dies, Tells, train
from tests.trainings.runs import (
    FOUR_RANKS,
    checkpoints,
    curve,
    interrupt,
    same_bits,
    send,
    shoal,
    small_config,
    start,
    train_in,
)

EVERY, STEPS = 3, 14


@pytest.fixture(scope="module")
def whole(corpus, pool, tmp_path_factory):
    """14 steps of an undisturbed run on 4 ranks of 2 imagined nodes; the state is in memory every 3."""
    memory = tmp_path_factory.mktemp("memory")
    config = small_config(
        corpus, FOUR_RANKS | {"micro_batch": 4}, train={"steps": STEPS, "validate_every": 0}, checkpoint={"every": 8},
        failover={"memory_every": EVERY, "memory_folder": str(memory), "node_ranks": 2},
    )
    folder = train_in(pool, config, tmp_path_factory.mktemp("whole") / "run")
    assert not list(memory.iterdir())  # given back
    return config, folder


@pytest.fixture(scope="module")
def died(whole, pool, tmp_path_factory) -> Callable[[], tuple[Path, Path]]:
    """The same run, until rank after rank is lost after step 10: memory has step 9, the disk step 8.

    A call returns its folder and its memory as they were then.
    """
    config, _ = whole
    folder, kept = tmp_path_factory.mktemp("died") / "run", tmp_path_factory.mktemp("kept")
    with pytest.raises(RankError, match="is lost"):
        train(pool, Dies, config, folder)
    places = {"folder": folder, "memory": run_dir(folder, config.failover)}
    for name, place in places.items():
        shutil.copytree(place, kept / name)

    def restore() -> tuple[Path, Path]:
        for name, place in places.items():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(kept / name, place)
        return folder, places["memory"]

    return restore


@pytest.mark.parametrize("lost", ["node 0", "both nodes"])
def test_the_same_layout_goes_on_bit_for_bit(lost, whole, died, pool):
    config, undisturbed = whole
    folder, memory = died()
    for node in {"node 0": (0,), "both nodes": (0, 1)}[lost]:
        shutil.rmtree(memory / f"node-{node:05d}")
    source = train(pool, Tells, config, folder, resume=True)
    assert source.startswith("step 8, from /" if lost == "both nodes" else "step 9, from memory")
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
    assert not memory.exists()


@pytest.mark.parametrize(
    "parallel", [{"micro_batch": 2}, {"pp": 2, "micro_batch": 2}, {"dp": 4, "zero": 3, "micro_batch": 1}]
)
def test_another_layout_goes_on_with_the_same_curve(parallel, whole, died, pool):
    config, undisturbed = whole
    folder, memory = died()
    shutil.rmtree(memory / "node-00001")
    changed = config.model_copy(update={"parallel": Layout(**parallel)})
    assert train(pool, Tells, changed, folder, resume=True) == "step 9, from memory"
    assert curve(folder)[:9] == curve(undisturbed)[:9]
    for (step, loss, _), (same_step, same_loss, _) in zip(curve(folder), curve(undisturbed), strict=True):
        assert step == same_step and loss == pytest.approx(same_loss, rel=2e-5, abs=0)


def test_a_run_goes_on_from_an_object_store(whole, pool, tmp_path):
    config, undisturbed = whole
    store = {"folder": f"file://{tmp_path}/store", "every": 4}
    config = config.model_copy(update={
        "checkpoint": config.checkpoint.model_copy(update=store),
        "failover": config.failover.model_copy(update={"memory_every": 0}),
    })
    with pytest.raises(RankError, match="is lost"):
        train(pool, Dies, config, tmp_path / "run")
    assert train(pool, Tells, config, tmp_path / "run", resume=True) == f"step 8, from {store['folder']}/step-00000008"
    assert curve(tmp_path / "run") == curve(undisturbed)
    assert same_bits(tmp_path / "store" / f"step-{STEPS:08d}", checkpoints(undisturbed)[STEPS])
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_killed_by_the_command_line_and_resumed_by_hand(corpus, tmp_path):
    """No checkpoint is on the disk yet, and less than a step is lost."""
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 2}, train={"steps": 2000, "validate_every": 0},
        checkpoint={"every": 0}, failover={"memory_every": 1, "memory_folder": str(tmp_path)},
    )
    save_config(config, tmp_path / "small.toml")
    folder = tmp_path / "run"
    interrupt(start("train", tmp_path / "small.toml", "--run-folder", folder), folder, 6, send(0, signal.SIGKILL))
    before, memory = curve(folder), run_dir(folder, config.failover)
    assert memory.exists() and not checkpoints(folder)
    code, output = shoal("train", "--resume", folder, "--train.steps", str(before[-1][0] + 6))
    assert code == 0, output
    (words,) = [line for line in output.splitlines() if "resumed after step" in line]
    assert "from memory" in words and int(words.split("step ")[1].split(",")[0]) >= before[-1][0] - 2
    after = curve(folder)
    assert [step for step, _, _ in after] == list(range(1, before[-1][0] + 7))
    assert after[: len(before) - 2] == before[:-2]
    assert not memory.exists()
