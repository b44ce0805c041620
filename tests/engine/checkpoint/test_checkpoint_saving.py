"""The `Checkpointer`: asynchronous, one save in flight, keeps the newest, deletes only its own, survives failures."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.engine.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load, newest, save, storage
from tests.engine.checkpoint.cuts import whole
from tests.trainings.runs import wait_for


def weights(value: float):
    return whole({"w": torch.full((4, 4), value), "step": torch.tensor(value)})


@pytest.fixture
def make(tmp_path):
    made, notes = [], []

    def make(keep=2, asynchronous=True):
        made.append(Checkpointer(tmp_path, group=None, keep=keep, asynchronous=asynchronous, report=notes.append))
        return made[-1]

    make.notes = notes
    yield make
    for checkpointer in made:
        checkpointer.close()


def loaded(path) -> float:
    state = weights(0)
    load(path, state)
    assert (state["w"][0].tensor == state["step"][0].tensor).all()
    return float(state["step"][0].tensor)


def steps(folder):
    return [step for step, _ in list_checkpoints(folder)]


def test_the_state_is_that_of_the_call_whatever_happens_to_the_tensors_after(make, tmp_path, monkeypatch):
    go_on, write = threading.Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda *args: (go_on.wait(), write(*args)))
    checkpointer, state = make(), weights(1)
    extra = {"tokens": [1]}
    checkpointer.save(1, state, extra)
    assert newest(tmp_path) is None  # it is not written yet
    state["w"][0].tensor.fill_(9)
    extra["tokens"].append(2)
    go_on.set()
    path = checkpointer.wait()
    assert loaded(path) == 1
    assert load(path, weights(0)) == {"tokens": [1]}


def test_at_most_one_save_is_in_flight(make, tmp_path):
    checkpointer = make(keep=9)
    for step in range(1, 6):
        checkpointer.save(step, weights(step), {})
        assert len(list(tmp_path.glob(".staging-*"))) <= 1
        assert steps(tmp_path)[: step - 1] == list(range(1, step))
    checkpointer.wait()
    assert [loaded(path) for _, path in list_checkpoints(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", [{"asynchronous": False}, {"block": True}])
def test_a_blocking_save_is_committed_on_return(make, tmp_path, how):
    checkpointer = make(asynchronous=how.get("asynchronous", True))
    assert checkpointer.save(1, weights(1), {}, block=how.get("block", False)) > 0
    assert steps(tmp_path) == [1]


def test_the_newest_are_kept_and_nothing_else_is_touched(make, tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000001.copy").mkdir()
    (tmp_path / "step-00000001.copy" / "manifest.json").write_text("a copy of a checkpoint")
    (tmp_path / ".staging-step-00000001-01234567").mkdir()  # of a killed run
    (tmp_path / ".staging-step-00000001-01234567.copy").mkdir()
    checkpointer = make(keep=2)
    for step in (2, 3, 4, 5):
        checkpointer.save(step, weights(step), {})
    checkpointer.wait()
    assert steps(tmp_path) == [4, 5]
    assert (tmp_path / "step-00000001" / "notes.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock", ".staging-step-00000001-01234567.copy", "notes.txt", "step-00000001", "step-00000001.copy",
        "step-00000004", "step-00000005",
    ]  # fmt: skip


def test_what_a_rename_commits_is_durable_before_it_and_so_is_the_rename(make, tmp_path, monkeypatch):
    """The power may fail at any time; `kill -9` alone leaves what was written to the system."""
    checkpointer, durable, renamed = make(keep=1), set(), []
    sync, rename = os.fsync, os.rename

    def noted(old, new):
        renamed.append(new)
        assert durable >= {os.stat(each).st_ino for each in (old, *Path(old).iterdir())}
        durable.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: (sync(file), durable.add(os.fstat(file).st_ino)))
    monkeypatch.setattr(os, "rename", noted)
    checkpointer.save(1, weights(1), {}, block=True)
    assert renamed == [str(tmp_path / "step-00000001")] and durable == {tmp_path.stat().st_ino}


def test_the_memory_of_a_save_grows_and_its_file_does_not_keep_what_was_there(make, tmp_path):
    checkpointer = make(keep=9)
    sizes = (4, 100, 4)
    for step, size in enumerate(sizes):
        checkpointer.save(step, whole({"w": torch.arange(size)}), {}, block=True)
    for (_, path), size in zip(list_checkpoints(tmp_path), sizes, strict=True):
        assert load_file(path / "rank-00000.safetensors")[f"w[0:{size}]"].tolist() == list(range(size))


def test_a_save_that_is_complete_is_told_once_it_is_waited_for(tmp_path):
    told = []
    checkpointer = Checkpointer(
        tmp_path, group=None, keep=1, asynchronous=True, saved=lambda step, folder: told.append((step, folder))
    )
    checkpointer.save(3, weights(1), {})
    wait_for(lambda: not checkpointer.in_flight)
    assert not told and checkpointer.wait() == tmp_path / "step-00000003"
    checkpointer.close()
    assert told == [(3, tmp_path / "step-00000003")]


@pytest.mark.parametrize("seen", [None, b"half"])
def test_what_a_rank_wrote_elsewhere_is_no_checkpoint_and_costs_none(make, tmp_path, monkeypatch, seen):
    """Ranks of two hosts may each have a folder of this name; a network file system may lose a part."""
    checkpointer, commit = make(keep=1), Checkpointer._commit
    checkpointer.save(1, weights(1), {}, block=True)

    def without(self, folder, *arguments):
        for file in folder.glob("*.safetensors"):
            file.write_bytes(seen) if seen else file.unlink()
        return commit(self, folder, *arguments)

    monkeypatch.setattr(save, "SEEN_SECONDS", 0.2)
    monkeypatch.setattr(Checkpointer, "_commit", without)
    with pytest.raises(CheckpointError, match="all ranks must save into one folder"):
        checkpointer.save(2, weights(2), {}, block=True)
    assert steps(tmp_path) == [1] and loaded(tmp_path / "step-00000001") == 1


def test_what_is_seen_late_on_a_network_file_system_is_waited_for(make, tmp_path, monkeypatch):
    checkpointer, commit = make(), Checkpointer._commit

    def late(self, folder, *arguments):
        file = (folder / "rank-00000.safetensors").rename(tmp_path / "not seen yet")
        threading.Timer(0.2, file.rename, [folder / "rank-00000.safetensors"]).start()
        return commit(self, folder, *arguments)

    monkeypatch.setattr(Checkpointer, "_commit", late)
    checkpointer.save(1, weights(1), {}, block=True)
    assert loaded(tmp_path / "step-00000001") == 1


def test_a_disk_that_goes_away_is_named_and_no_folder_of_other_ranks(make, tmp_path, monkeypatch):
    checkpointer, commit = make(keep=1), Checkpointer._commit
    monkeypatch.setattr(Checkpointer, "_commit", lambda self, folder, *rest: (
        shutil.rmtree(folder), commit(self, folder, *rest))[1])
    with pytest.raises(CheckpointError, match=r"saving step 2 failed: .*staging-step-00000002.* is gone: its disk was"):
        checkpointer.save(2, weights(2), {}, block=True)


def test_a_run_that_went_back_does_not_lose_its_new_checkpoint_to_old_later_ones(make, tmp_path):
    checkpointer = make(keep=1)
    checkpointer.save(300, weights(1), {})
    checkpointer.save(100, weights(2), {}, block=True)
    assert steps(tmp_path) == [100, 300]


def test_the_same_step_again_stays_if_equal(make, tmp_path):
    checkpointer = make()
    path = tmp_path / "step-00000001"
    checkpointer.save(1, weights(math.nan), {"loss": math.nan}, block=True)
    before = (path / "manifest.json").stat().st_ino
    checkpointer.save(1, weights(math.nan), {"loss": math.nan}, block=True)
    assert (path / "manifest.json").stat().st_ino == before
    assert "intact and bit-identical" in make.notes[0]
    assert list(tmp_path.glob("*-step-*")) == []


def test_the_same_step_again_sets_another_or_damaged_one_aside(make, tmp_path):
    checkpointer = make()
    checkpointer.save(1, weights(1), {}, block=True)
    checkpointer.save(1, weights(2), {}, block=True)
    assert loaded(newest(tmp_path).path) == 2
    (tmp_path / "step-00000001" / "rank-00000.safetensors").write_bytes(b"torn")
    checkpointer.save(1, weights(2), {}, block=True)  # the same manifest, but the old data is damaged
    assert loaded(newest(tmp_path).path) == 2
    first, second = sorted(tmp_path.glob("set-aside-step-00000001-*"), key=lambda p: p.name in make.notes[1])
    assert loaded(first) == 1  # kept whole
    assert (second / "rank-00000.safetensors").read_bytes() == b"torn"
    assert "is kept as" in make.notes[0]


def test_a_failure_in_the_background_is_raised_at_the_next_call_and_saving_goes_on(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    checkpointer = make()
    checkpointer.save(1, weights(1), {}, block=True)
    with monkeypatch.context() as broken:
        broken.setattr(storage, "write", full)
        checkpointer.save(2, weights(2), {})
        with pytest.raises(CheckpointError, match=r"(?s)saving step 2 failed.*No space left.*step-00000001"):
            checkpointer.save(3, weights(3), {})
    assert [p.name for p in tmp_path.glob("*step*")] == ["step-00000001"]
    assert list(tmp_path.glob(".staging*")) == []
    checkpointer.save(4, weights(4), {}, block=True)
    assert steps(tmp_path) == [1, 4]


def test_what_is_not_json_is_refused_with_the_step(make):
    checkpointer = make()
    with pytest.raises(CheckpointError, match=r"saving step 1 failed.*not JSON serializable"):
        checkpointer.save(1, weights(1), {"rng": torch.ones(1)}, block=True)


def test_a_piece_that_does_not_fit_its_box_is_named(make):
    state = weights(1)
    state["w"][0].tensor = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"'w': a piece of shape \(3,\) is given for the box \[0:4,0:4\]"):
        make().save(1, state, {}, block=True)


def test_an_abandoned_checkpointer_leaves_its_memory_to_the_next(make):
    first = make()
    first.prepare(weights(1))
    assert first._memory.numel() > 0
    first.abandon(reuse=True)
    second = make()
    second.prepare(weights(2))
    assert second._memory.data_ptr() == first._memory.data_ptr()
    second.abandon()
    assert make()._memory.numel() == 0  # no other is to keep it


def test_an_abandoned_save_that_is_still_written_stays_uncommitted(make, tmp_path, monkeypatch):
    go_on, write = threading.Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda *args: (go_on.wait(), write(*args)))
    first = make()
    first.save(1, weights(1), {})
    begin = time.monotonic()
    first.abandon(reuse=True, seconds=0.0)
    assert time.monotonic() - begin < 5 and first.in_flight
    second = make()
    assert second._memory.numel() == 0  # the other thread still reads it
    go_on.set()
    with pytest.raises(CancelledError):
        first.wait()
    second.save(2, weights(2), {}, block=True)
    assert steps(tmp_path) == [2] and list(tmp_path.glob(".staging*")) == []


@pytest.mark.parametrize("function, seconds", [("write", 30.0), ("rename", 0.0)])
def test_a_save_that_is_about_to_end_is_not_left(make, tmp_path, monkeypatch, function, seconds):
    """A write is waited for as long as was said; a commit, which only this thread can end, in any case."""
    call = getattr(storage, function)
    monkeypatch.setattr(storage, function, lambda *args: (time.sleep(0.2), call(*args))[1])
    checkpointer = make()
    checkpointer.save(1, weights(1), {})
    if function == "rename":
        wait_for(lambda: list(tmp_path.glob(".staging-*/manifest.json")))
    checkpointer.abandon(seconds=seconds)
    assert steps(tmp_path) == [1] and not checkpointer.in_flight


def leave_a_save(folder) -> tuple[float, bool, bool]:
    """Leave a save in which the other rank takes no part yet, and save again.

    Returns:
        the seconds that leaving took; whether the thread still waited; whether the next checkpointer got its memory.
    """
    rank = dist.get_rank()
    checkpointer = Checkpointer(folder, group=dist.new_group(backend="gloo"), keep=9, asynchronous=True)
    begin, waits = time.monotonic(), False
    if rank == 0:
        checkpointer.save(1, weights(1), {})
        checkpointer.abandon(reuse=True)
        waits = checkpointer.in_flight
    seconds = time.monotonic() - begin
    dist.barrier()
    if rank == 1:  # takes part after all
        checkpointer.save(1, {}, {})
        checkpointer.abandon()
    dist.barrier()
    after = Checkpointer(folder, group=dist.new_group(backend="gloo"), keep=9, asynchronous=True)
    reused = after._memory.numel() > 0
    after.save(2, weights(2) if rank == 0 else {}, {})
    after.close()
    return seconds, waits, reused


def test_a_survivor_leaves_a_save_that_waits_for_a_lost_rank(pool, tmp_path):
    """gloo may wait for a rank that ended during a transfer, until its timeout of half an hour."""
    (seconds, waits, reused), _ = pool.run(leave_a_save, 2, tmp_path)
    assert waits and seconds < 5 and not reused
    assert steps(tmp_path) == [2] and list(tmp_path.glob(".staging*")) == []


ENDS = """
import sys, time
from pathlib import Path
from shoal.engine.checkpoint import Checkpointer, save
from shoal.launch.forked_process import ForkedProcess
from tests.engine.checkpoint.test_checkpoint_saving import weights

exchange = save.gather

def end(folder, gather):
    save.gather = gather
    checkpointer = Checkpointer(Path(sys.argv[1], folder), group=None, keep=1, asynchronous=True)
    checkpointer.save(1, weights(1), {})
    if folder == "left":
        checkpointer.abandon()
    raise ArithmeticError

print(ForkedProcess(lambda: end("awaited", lambda *args: (time.sleep(0.2), exchange(*args))[1])).wait())
print(ForkedProcess(lambda: end("left", lambda *args: time.sleep(1000))).wait())
end("left", lambda *args: time.sleep(1000))
"""


def test_the_end_of_a_process_waits_for_a_save_unless_it_was_left(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1"] and done.stderr.splitlines().count("ArithmeticError") == 3
    assert loaded(newest(tmp_path / "awaited").path) == 1 and newest(tmp_path / "left") is None


def test_keeping_none_is_refused(make):
    with pytest.raises(CheckpointError, match=r"checkpoint.keep = 0"):
        make(keep=0)


def test_a_new_run_is_refused_in_the_folder_of_another(make, tmp_path):
    make().save(1, weights(1), {}, block=True)
    with pytest.raises(CheckpointError, match=r"already holds step-00000001 of another run"):
        Checkpointer(tmp_path, group=None, keep=1, asynchronous=True, fresh=True)
    Checkpointer(tmp_path / "own", group=None, keep=1, asynchronous=True, fresh=True).close()


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_failed_save_left_goes_with_the_next_good_one(make, tmp_path, monkeypatch, step):
    """A disk that is away or read-only lets nothing be removed; the same step may be saved again, as the last is."""
    checkpointer = make()

    def no_disk(*_):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr(storage, "rename", no_disk)
        broken.setattr(storage, "remove", no_disk)
        with pytest.raises(CheckpointError, match="Read-only"):
            checkpointer.save(1, weights(1), {}, block=True)
    assert len(list(tmp_path.glob(".staging*"))) == 1
    checkpointer.save(step, weights(2), {}, block=True)
    assert list(tmp_path.glob(".staging*")) == [] and steps(tmp_path) == [step]
    assert loaded(newest(tmp_path).path) == 2


def quarantine_on_a_broken_disk(folder) -> str:
    checkpointer = Checkpointer(folder, group=dist.new_group(backend="gloo"), keep=9, asynchronous=True)
    checkpointer.save(1, weights(1) if dist.get_rank() == 0 else {}, {}, block=True)
    rename, storage.rename = storage.rename, None
    try:
        checkpointer.quarantine(after=0)
    except CheckpointError as error:
        return str(error)
    finally:
        storage.rename = rename
        checkpointer.close()
    return ""


def test_every_rank_is_told_that_a_bad_checkpoint_could_not_be_quarantined(pool, tmp_path):
    """No rank continues or waits for another. A restart would resume from the bad checkpoint."""
    for error in pool.run(quarantine_on_a_broken_disk, 2, tmp_path):
        assert error.startswith("checkpoints after step 0 are not to be used, but were not renamed: ")
