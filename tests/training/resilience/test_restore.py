"""What is damaged, partial or of another run is refused by name, and the newest good state is taken."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.base.errors import UsageError
from shoal.engine.checkpoint import Checkpointer
from shoal.spec.config import RunConfig
from shoal.training.resilience import memory_slot
from shoal.training.resilience.host_memory_dir import run_dir
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from shoal.training.resilience.restore import restore
from shoal.training.state_manager import StateManager
from tests.engine.checkpoint.cuts import whole

MODEL = {"layers": 2, "hidden": 8}


def state_of(step: int, **changes: torch.Tensor | None):
    tensors = {"model.w": torch.full((3, 4), float(step)), "optimizer.m": torch.full((5,), float(step))} | changes
    return whole({name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.fixture
def disk(tmp_path) -> Path:
    """Steps 1, 2 and 3."""
    saves = Checkpointer(tmp_path / "disk", group=None, keep=9, asynchronous=False)
    for step in (1, 2, 3):
        saves.save(step, state_of(step), {"model": MODEL})
    saves.close()
    return tmp_path / "disk"


def go_on(disk: Path, home: Path | None = None):
    state = state_of(0)
    found, notes = restore(disk, home or disk / "none", state, group=None, model=MODEL)
    if found:
        assert all((piece.tensor == found.step).all() for pieces in state.values() for piece in pieces)
    return found, notes


def rewrite_manifest(folder: Path, change) -> None:
    """A manifest that says something else, and whose checksum is right."""
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    data = json.dumps(values).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  manifest.json\n")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 8
    path.write_bytes(data)


TROUBLE = {
    "a flipped bit": (lambda f: flip(f / "rank-00000.safetensors"), "rank-00000.safetensors is damaged: tensor"),
    "a short file": (
        lambda f: (f / "rank-00000.safetensors").write_bytes((f / "rank-00000.safetensors").read_bytes()[:-5]),
        "rank-00000.safetensors is damaged: .* bytes, but .* were written",
    ),
    "a missing file": (lambda f: (f / "rank-00000.safetensors").unlink(), "rank-00000.safetensors cannot be read"),
    "a damaged manifest": (lambda f: flip(f / "manifest.json"), "manifest.json is damaged"),
    "no checksum": (lambda f: (f / "manifest.sha256").unlink(), "step-00000003 is not a complete checkpoint"),
    "another model": (
        lambda f: rewrite_manifest(f, lambda m: m["extra"].update(model=MODEL | {"layers": 3})),
        "holds another model than this run's:\n  layers: 3 saved, 2 in this run",
    ),
    "a tensor less": (
        lambda f: rewrite_manifest(f, lambda m: m["tensors"].pop("optimizer.m")), "has no tensor 'optimizer.m'",
    ),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_the_newest_good_one_on_disk_is_taken_and_the_newer_one_named(what, disk):
    cause, message = TROUBLE[what]
    cause(disk / "step-00000003")
    found, notes = go_on(disk)
    assert found.step == 2 and found.save is None
    assert len(notes) == 1 and notes[0].startswith("checkpoint refused: ")
    assert re.search(message, notes[0])


def test_with_every_one_damaged_each_is_named(disk):
    for step in (1, 2, 3):
        flip(disk / f"step-0000000{step}" / "rank-00000.safetensors")
    found, notes = go_on(disk)
    assert found is None
    assert [f"step-0000000{step}" in note for step, note in zip((3, 2, 1), notes, strict=True)] == [True] * 3


@pytest.mark.parametrize("what", ["another model", "a tensor less", "another shape", "a flipped bit"])
def test_what_memory_holds_of_something_else_is_refused_and_the_disk_taken(what, disk, tmp_path):
    memory = InMemoryCheckpointer(tmp_path / "home", tmp_path, group=None, places=RankTopology.collect(None))
    changes = {"a tensor less": {"optimizer.m": None}, "another shape": {"model.w": torch.zeros(3, 5)}}.get(what, {})
    model = MODEL | {"layers": 3} if what == "another model" else MODEL
    memory.save(5, state_of(5, **changes), {"model": model})
    memory.wait()
    if what == "a flipped bit":
        flip(next(memory_slot.list_slots(tmp_path / "home")[0].glob("*.safetensors")))
    found, notes = go_on(disk, tmp_path / "home")
    assert found.step == 3 and len(notes) == 1 and notes[0].startswith("in memory refused: ")
    named = {"another model": "layers: 3 saved, 2 in this run", "a tensor less": "has no tensor 'optimizer.m'",
             "another shape": "tensor 'model.w' was saved with shape (3, 5)", "a flipped bit": "tensor"}[what]
    assert named in notes[0]


def test_what_is_damaged_after_it_was_listed_is_refused_too(disk, tmp_path, monkeypatch):
    memory = InMemoryCheckpointer(tmp_path / "home", tmp_path, group=None, places=RankTopology.collect(None))
    memory.save(5, state_of(5), {"model": MODEL})
    memory.wait()
    read_all = memory_slot.read_all

    def damage_after(home: Path):
        found = read_all(home)
        flip(memory_slot.list_slots(home)[0] / memory_slot.PART)
        return found

    monkeypatch.setattr(memory_slot, "read_all", damage_after)
    found, notes = go_on(disk, tmp_path / "home")
    assert found.step == 3 and len(notes) == 1 and notes[0].endswith("is damaged.")


@pytest.mark.parametrize("how", ["damaged", "away"])
def test_a_restart_does_not_start_over_while_checkpoints_are_there_but_cannot_be_read(how, disk, tmp_path):
    """It would repeat the whole run, though the disk may be back in a minute."""
    for path in disk.glob("step-*/manifest.json"):
        path.unlink() if how == "away" else path.write_text("{}")
    if how == "away":
        (disk := tmp_path / "mounted").symlink_to("mounted")
    run = SimpleNamespace(restore=lambda: go_on(disk), folder=tmp_path / "run")
    with pytest.raises(UsageError, match=r"cannot be listed" if how == "away" else r"(?s)refused.*refused.*refused"):
        StateManager.resume(run, restarted=True)


def test_a_restart_starts_over_if_only_memory_had_a_state(tmp_path):
    begun = []
    run = SimpleNamespace(restore=lambda: (None, ["in memory refused: step 3: no node has the part of rank 1 of 2."]),
                          folder=tmp_path, _begin=begun.append)  # fmt: skip
    assert StateManager.resume(run, restarted=True) is None and begun == [None]


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_run_that_ends_without_its_memory_frees_that_of_an_earlier_attempt(mode, tmp_path):
    """A folder that shoal would not use either, as others can read it, stays."""
    config = RunConfig(failover={"memory_every": 1, "memory_folder": tmp_path})
    (home := run_dir(tmp_path / "run", config.failover)).mkdir(mode=mode)
    (home / "state").touch()
    run = SimpleNamespace(disk=SimpleNamespace(close=lambda: None), memory=None, config=config, folder=tmp_path / "run")
    StateManager.close(run)
    assert home.exists() == (mode != 0o700)
