"""``kill -9`` at every point of a save: what was committed loads, and what is torn is never seen."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shoal.engine.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load, storage, verify
from shoal.engine.checkpoint.manifest import MANIFEST, list_interrupted
from shoal.engine.checkpoint.save import check_folder
from shoal.launch.worker_pool import Pool, RankError
from tests.engine.checkpoint.cuts import whole
from tests.trainings.runs import DEADLINE, wait_for


def paused_run(folder: Path, function: str, prefix: str, steps: tuple[int, ...]) -> None:
    """A run that stops for ever in its last save, just before the given call on the file system; a file says so."""
    number, original = 0, getattr(storage, function)

    def paused(path: Path, *args: object) -> object:
        if number == len(steps) and path.name.startswith(prefix):
            if function == "write":
                path.write_bytes(b"half")
            Path(folder, "paused").write_text(str(os.getpid()))
            time.sleep(1000)
        return original(path, *args)

    setattr(storage, function, paused)
    checkpointer = Checkpointer(folder, group=None, keep=1, asynchronous=True)
    for number, step in enumerate(steps, 1):
        checkpointer.save(step, whole({"w": torch.full((4, 4), float(number))}), {})
        if number < len(steps):
            checkpointer.wait()
    checkpointer.close()


@contextmanager
def paused(pool: Pool, folder: Path, function: str, prefix: str, steps: tuple[int, ...] = (1, 2)) -> Iterator[None]:
    """That run in a process of its own, once it has stopped; it is killed when the context ends."""
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(pool.run, paused_run, 1, folder, function, prefix, steps, timeout=DEADLINE)
        wait_for(lambda: run.done() or ((folder / "paused").exists() and (folder / "paused").read_text()))
        try:
            yield
        finally:
            os.kill(int((folder / "paused").read_text()), signal.SIGKILL)
            with pytest.raises(RankError, match="was killed by SIGKILL"):
                run.result()


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
def test_a_kill_leaves_a_whole_checkpoint_and_no_torn_one(pool, tmp_path, function, prefix, survivor):
    with paused(pool, tmp_path, function, prefix):
        pass

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


def test_a_kill_after_the_old_one_of_the_step_was_set_aside_leaves_the_new_one(pool, tmp_path):
    with paused(pool, tmp_path, "rename", ".staging-step-00000001", steps=(1, 1)):
        assert list_checkpoints(tmp_path) == [] and len(list(tmp_path.glob("set-aside-step-00000001-*"))) == 1
    with pytest.raises(CheckpointError, match=r"already holds step-00000001 of another run"):
        check_folder(tmp_path, fresh=True)  # a new run would delete it

    notes: list[str] = []
    Checkpointer(tmp_path, group=None, keep=1, asynchronous=True, report=notes.append).close()
    path = tmp_path / "step-00000001"
    assert notes == [f"{path} was complete when its save was killed; it is committed now"]
    state = whole({"w": torch.zeros(4, 4)})
    load(path, state)
    assert (state["w"][0].tensor == 2).all()


def test_a_kill_in_the_manifest_of_a_step_that_was_set_aside_commits_nothing(pool, tmp_path):
    """Its manifest is torn. Committed, it would count as the newest, and an older one would be deleted for it."""
    with paused(pool, tmp_path, "rename", ".staging-step-00000001", steps=(1, 1)):
        pass
    [staged] = tmp_path.glob(".staging-step-00000001-*")
    manifest = (staged / MANIFEST).read_bytes()
    (staged / MANIFEST).write_bytes(manifest[: len(manifest) // 2])
    assert list_interrupted(tmp_path) == []
    notes: list[str] = []
    Checkpointer(tmp_path, group=None, keep=1, asynchronous=True, report=notes.append).close()
    assert notes == [] and list_checkpoints(tmp_path) == []


def test_two_runs_cannot_save_into_one_folder(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.1)
    with paused(pool, tmp_path, "rename", ".staging-step-00000002"):
        with pytest.raises(CheckpointError, match=r"another process saves checkpoints into"):
            Checkpointer(tmp_path, group=None, keep=1, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"another process saves checkpoints into"):
            check_folder(tmp_path, fresh=False)
        assert len(list(tmp_path.glob(".staging-*"))) == 1  # the living run's staging folder is left alone
    Checkpointer(tmp_path, group=None, keep=1, asynchronous=True).close()
