"""Checkpoints in an object store: whole or not there, though nothing is renamed."""

import math
import threading
import time
import uuid
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.addresses import to_path
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.checkpoint import (
    Checkpointer,
    CheckpointError,
    list_checkpoints,
    load,
    newest,
    newest_good,
    storage,
    verify,
)
from shoal.engine.checkpoint.storage import list_names
from tests.engine.checkpoint.bucket import Bucket, address
from tests.engine.checkpoint.cuts import blank, cut, random_values, same, whole, write_checkpoint


@pytest.fixture(params=["bucket", "memory", "file"])
def folder(request, tmp_path):
    if request.param == "memory":
        return to_path(f"memory://{uuid.uuid4()}/run")
    return to_path(address(tmp_path / "run") if request.param == "bucket" else f"file://{tmp_path}/run")


def weights(value: float):
    return whole({"w": torch.full((4, 4), float(value)), "none": torch.zeros(0), "step": torch.tensor(float(value))})


def checkpointer(folder, **options) -> Checkpointer:
    return Checkpointer(folder, group=None, **{"keep": 2, "asynchronous": True} | options)


def loaded(path) -> float:
    state = weights(math.nan)
    load(path, state)
    assert (state["w"][0].tensor == state["step"][0].tensor).all()
    return float(state["step"][0].tensor)


def test_what_is_saved_is_loaded_and_the_newest_are_kept(folder):
    saves = checkpointer(folder)
    for step in (1, 2, 3):
        saves.save(step, weights(step), {"step": step})
    saves.close()
    assert [step for step, _ in list_checkpoints(folder)] == [2, 3]
    found, refused = newest_good(folder)
    assert found.step == 3 and not refused and loaded(found.path) == 3
    assert str(found.path).startswith(f"{folder}/step-0000000")
    assert main(["checkpoint", "verify", str(found.path)]) == 0
    assert main(["checkpoint", "inspect", str(found.path)]) == 0
    with pytest.raises(CheckpointError, match="already holds step-00000003 of another run"):
        checkpointer(folder, fresh=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_any_cut_loads_into_any_other(seed, ranks, later):
    rng = Random(seed)
    values = random_values(rng, {"a": (5, 3), "b": (4,), "c": ()})
    path = write_checkpoint(to_path(f"memory://{uuid.uuid4()}/step-00000001"), cut(rng, values, ranks))
    for state in blank(cut(rng, values, later)):
        load(path, state)
        for name, pieces in state.items():
            assert all(same(piece.tensor, values[name][piece.box.slices]) for piece in pieces)


def save_on_ranks(folder: str, step: int) -> None:
    from tests.engine.checkpoint.bucket import address

    address(folder)
    values = random_values(Random(step), {"a": (6, 4), "b": (5,)})
    saves = Checkpointer(to_path(f"bucket://{folder}"), group=dist.new_group(backend="gloo"), keep=2, asynchronous=True)
    saves.save(step, cut(Random(7), values, dist.get_world_size())[dist.get_rank()], {})
    saves.close()


def test_several_ranks_save_one(pool, tmp_path):
    pool.run(save_on_ranks, 3, tmp_path / "run", 5)
    found = newest(to_path(address(tmp_path / "run")))
    values = random_values(Random(5), {"a": (6, 4), "b": (5,)})
    state = blank([whole({name: values[name].clone() for name in values})])[0]
    load(found.path, state)
    assert found.step == 5 and all(same(state[name][0].tensor, values[name]) for name in values)


@pytest.mark.parametrize("writes", range(3))
def test_a_save_that_does_not_get_to_its_end_is_no_checkpoint(writes, tmp_path, monkeypatch):
    """Of a file, a checksum and a manifest, so many are written; the next save of the same step does."""
    folder = to_path(address(tmp_path / "run"))
    saves = checkpointer(folder)
    saves.save(1, weights(1), {}, block=True)
    monkeypatch.setattr(Bucket, "writes_left", writes)
    with pytest.raises(CheckpointError, match=r"saving step 2 failed: .*the store is gone"):
        saves.save(2, weights(2), {}, block=True)
    monkeypatch.undo()
    assert newest(folder).step == 1 and list_names(folder) == ["step-00000001"]
    saves.save(2, weights(2), {}, block=True)
    assert loaded(newest(folder).path) == 2


def test_what_a_dead_run_left_is_no_checkpoint_and_is_written_over(tmp_path):
    folder = to_path(address(tmp_path / "run"))
    saves = checkpointer(folder)
    saves.save(1, weights(1), {}, block=True)
    (tmp_path / "run" / "step-00000002").mkdir()
    (tmp_path / "run" / "step-00000002" / "rank-00000.safetensors").write_bytes(b"torn")
    (tmp_path / "run" / "step-00000002" / "rank-00001.safetensors").write_bytes(b"torn")
    assert newest(folder).step == 1
    saves.save(2, weights(2), {}, block=True)
    assert loaded(newest(folder).path) == 2
    assert list_names(folder / "step-00000002") == ["manifest.json", "manifest.sha256", "rank-00000.safetensors"]


def test_the_same_step_again_keeps_the_old_one_beside_it(folder):
    notes = []
    saves = checkpointer(folder, report=notes.append)
    saves.save(1, weights(1), {}, block=True)
    saves.save(1, weights(2), {}, block=True)
    assert loaded(newest(folder).path) == 2
    (aside,) = [name for name in list_names(folder) if name.startswith("set-aside-step-00000001-")]
    assert loaded(folder / aside) == 1 and aside in notes[0]


def test_a_store_that_does_not_answer_costs_no_checkpoint(tmp_path, monkeypatch):
    """What may be a whole checkpoint of this step is not taken for the rest of a killed run."""
    folder = to_path(address(tmp_path / "run"))
    saves = checkpointer(folder)
    saves.save(1, weights(1), {}, block=True)
    monkeypatch.setattr(Bucket, "silent", True)
    with pytest.raises(CheckpointError, match=r"saving step 1 failed: .*no answer"):
        saves.save(1, weights(2), {}, block=True)
    monkeypatch.undo()
    assert newest(folder).step == loaded(newest(folder).path) == 1


def test_a_write_into_a_store_is_waited_for_after_a_loss(tmp_path, monkeypatch):
    """It could change the files of a later save of this step."""
    write, begun, ended = storage.write, threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        time.sleep(0.2)
        write(*args)
        ended.set()

    monkeypatch.setattr(storage, "write", slow)
    saves = checkpointer(to_path(address(tmp_path / "run")))
    saves.save(1, weights(1), {})
    begun.wait()
    saves.abandon(seconds=0.0)
    assert ended.is_set()


def test_quarantined_steps_are_kept_under_another_name(folder):
    notes = []
    saves = checkpointer(folder, report=notes.append)
    for step in (1, 2):
        saves.save(step, weights(step), {})
    saves.quarantine(after=1)
    assert newest(folder).step == 1 and notes[0].startswith("quarantined step-00000002 as set-aside-step-00000002-")
    (aside,) = [name for name in list_names(folder) if name.startswith("set-aside-")]
    assert loaded(folder / aside) == 2


def test_a_checkpoint_is_renamed_inside_the_store(tmp_path, monkeypatch):
    folder = to_path(address(tmp_path / "run"))
    saves = checkpointer(folder, report=lambda note: None)
    for step in (1, 2):
        saves.save(step, weights(step), {}, block=True)
    monkeypatch.setattr(Bucket, "writes_left", 0)  # what would be downloaded could not be written back
    saves.quarantine(after=1)
    (aside,) = [name for name in list_names(folder) if name.startswith("set-aside-")]
    assert newest(folder).step == 1 and loaded(folder / aside) == 2


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json", "manifest.sha256"])
def test_damage_is_named_and_the_one_before_taken(name, how, tmp_path):
    folder = to_path(address(tmp_path / "run"))
    saves = checkpointer(folder)
    for step in (1, 2):
        saves.save(step, weights(step), {}, block=True)
    file = tmp_path / "run" / "step-00000002" / name
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-7])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    found, refused = newest_good(folder)
    unharmed = name == "manifest.sha256" and how == "cut"  # its digest is still there
    assert found.step == loaded(found.path) == (2 if unharmed else 1)
    if unharmed or (how == "missing" and name == "manifest.json"):  # without which there is no checkpoint
        assert not refused
    else:
        assert len(refused) == 1 and "step-00000002" in str(refused[0])


def test_an_unknown_protocol_is_refused(capsys):
    with pytest.raises(UsageError, match=r"(?s)checkpoint.folder = 'nowhere://a'.*Install the fsspec package"):
        to_path("nowhere://a")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        verify(to_path("memory://nothing/step-00000001"))
