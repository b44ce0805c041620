"""``kill -9`` at every point of a save: what was committed loads, and what is torn is never seen."""

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from shoal.engine.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load, storage, verify
from shoal.launch.forkserver import worker_context
from tests.engine.checkpoint.cuts import whole


def paused_run(folder: Path, function: str, prefix: str) -> None:
    """A run that stops for ever just before the given call on the file system, and says so by a file."""
    step, original = 0, getattr(storage, function)

    def paused(path: Path, *args: object) -> object:
        if step == 2 and path.name.startswith(prefix):
            if function == "write":
                path.write_bytes(b"half")
            Path(folder, "paused").touch()
            time.sleep(1000)
        return original(path, *args)

    setattr(storage, function, paused)
    checkpointer = Checkpointer(folder, group=None, keep=1, asynchronous=True)
    for step in (1, 2):
        checkpointer.save(step, whole({"w": torch.full((4, 4), float(step))}), {})
        if step == 1:
            checkpointer.wait()
    checkpointer.close()


def start(folder: Path, function: str, prefix: str) -> BaseProcess:
    """That run in a process of its own, once it has stopped."""
    run = worker_context().Process(target=paused_run, args=(folder, function, prefix), daemon=True)
    run.start()
    deadline = time.monotonic() + 60
    while not (folder / "paused").exists():
        assert run.is_alive(), "the run ended before the pause"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return run


@pytest.mark.parametrize(
    ("function", "prefix", "survivor"),
    [
        ("write", "rank-00000.safetensors", 1),  # while the data is written
        ("write", "manifest.json", 1),  # between the data and the manifest
        ("write", "manifest.sha256", 1),
        ("rename", ".staging-step-00000002", 1),  # all is written, but not committed
        ("rename", "step-00000001", 2),  # committed; the old one is about to go
        ("remove", ".staging-removed-step-00000001", 2),  # the old one is gone by name only
    ],
)
def test_a_kill_leaves_a_whole_checkpoint_and_no_torn_one(tmp_path, function, prefix, survivor):
    run = start(tmp_path, function, prefix)
    run.kill()
    run.join()

    for _, path in list_checkpoints(tmp_path):
        verify(path)
    step, path = list_checkpoints(tmp_path)[-1]
    state = whole({"w": torch.zeros(4, 4)})
    load(path, state)
    assert step == survivor
    assert (state["w"][0].tensor == survivor).all()

    resumed = Checkpointer(tmp_path, group=None, keep=1, asynchronous=True)  # sweeps up, and can save the same step
    assert list(tmp_path.glob(".staging-*")) == []
    assert list_checkpoints(tmp_path)[-1].step == survivor
    resumed.save(2, whole({"w": torch.full((4, 4), 2.0)}), {})
    resumed.close()
    assert list_checkpoints(tmp_path) == [(2, tmp_path / "step-00000002")]


def test_two_runs_cannot_save_into_one_folder(tmp_path):
    run = start(tmp_path, "rename", ".staging-step-00000002")
    try:
        with pytest.raises(CheckpointError, match=r"another process saves checkpoints into"):
            Checkpointer(tmp_path, group=None, keep=1, asynchronous=True)
        assert len(list(tmp_path.glob(".staging-*"))) == 1  # the living run's staging folder is left alone
    finally:
        run.kill()
        run.join()
    Checkpointer(tmp_path, group=None, keep=1, asynchronous=True).close()
