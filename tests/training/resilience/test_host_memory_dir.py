"""The folder in host memory that a state lies in: whose it is, what is swept up, and that there is room."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from shoal.base.errors import UsageError
from shoal.training.resilience import host_memory_dir, memory_slot, owned_folders
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from tests.training.resilience.states import go_on, keep, pieces_of


def checkpointer(folder, **given):
    return InMemoryCheckpointer(folder / "home", folder, group=None, places=RankTopology.collect(None), **given)


def test_the_memory_is_private_and_given_back(tmp_path):
    home = tmp_path / "home"
    memory = checkpointer(tmp_path)
    memory.save(1, pieces_of(1, 3, 0, 1), {"step": 1})
    memory.wait()
    assert home.stat().st_mode & 0o777 == 0o700
    assert all(not p.stat().st_mode & 0o077 for p in home.rglob("*.safetensors"))
    memory.close()
    assert not home.exists()


@pytest.mark.parametrize("how", ["open to all", "a link"])
def test_a_folder_that_another_could_have_made_is_neither_read_nor_written(how, tmp_path):
    keep([tmp_path / "real"], [1], 3)
    home = tmp_path / "home"
    if how == "a link":
        home.symlink_to(tmp_path / "real")
    else:
        shutil.copytree(tmp_path / "real", home)
        home.chmod(0o755)
    assert go_on([home], tmp_path / "disk", 3)[0] is None
    with pytest.raises(UsageError, match="is not a private folder of this user"):
        checkpointer(tmp_path)


def test_what_dead_owners_left_is_swept_up_and_what_the_living_have_is_not(tmp_path, monkeypatch):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    folders = {}
    for name, owner in {"dead": int(dead.stdout), "alive": os.getpid(), "mine": int(dead.stdout)}.items():
        monkeypatch.setenv("SHOAL_OWNER", str(owner))
        folders[name] = tmp_path / f"shoal-{os.getuid()}-{name}"
        monkeypatch.setattr(owned_folders, "start_time", lambda pid, known=owned_folders.start_time: known(pid) or 1.0)
        host_memory_dir.make_run_dir(folders[name])
        host_memory_dir.claim_run_dir(folders[name], tmp_path / name)
        monkeypatch.undo()
    (tmp_path / "shoal-other").mkdir()
    (tmp_path / f"shoal-{os.getuid()}-strange").mkdir()
    (line,) = host_memory_dir.remove_orphans(folders["mine"])
    assert str(tmp_path / "dead") in line
    assert sorted(p.name.split("-")[-1] for p in tmp_path.iterdir()) == ["alive", "mine", "other", "strange"]


def test_too_little_memory_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory_dir.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100}))
    with pytest.raises(UsageError, match=r"(?s)memory_every: .* need \d+ B in .* has \d+ B free.*memory_every = 0"):
        checkpointer(tmp_path, state=pieces_of(1, 3, 0, 1))
    monkeypatch.undo()
    checkpointer(tmp_path, state=pieces_of(1, 3, 0, 1))


def test_what_a_sweep_gives_back_counts_as_room(tmp_path, monkeypatch):
    left = tmp_path / f"shoal-{os.getuid()}-dead"
    host_memory_dir.make_run_dir(left)
    (left / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": 0, "started": 1.0, "run": "x"}))
    (left / "state").write_bytes(bytes(5000))
    monkeypatch.setattr(host_memory_dir.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100}))
    host_memory_dir.check_run_dir(tmp_path / "new", 5000)
    with pytest.raises(UsageError, match=r"6 kB in .* has 5.1\d kB free"):
        host_memory_dir.check_run_dir(tmp_path / "new", 6000)
    assert [path.name for path in tmp_path.iterdir()] == [left.name]


def test_a_run_that_resumes_needs_a_private_folder_and_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory_dir.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 0}))
    host_memory_dir.check_run_dir(tmp_path / "new", None)
    with pytest.raises(UsageError, match=r"failover.memory_folder = .*none' does not exist"):
        host_memory_dir.check_run_dir(tmp_path / "none" / "new", None)
    (tmp_path / "new").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="is not a private folder of this user"):
        host_memory_dir.check_run_dir(tmp_path / "new", None)


def test_no_room_for_its_owner_is_told(tmp_path, monkeypatch):
    """Memory that filled up since it was looked at."""
    def full(*args, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"failover.memory_folder = .* cannot be written: No space left on device"):
        checkpointer(tmp_path)


def test_no_room_while_it_runs_is_told_and_costs_nothing_but_that_save(tmp_path, monkeypatch):
    said = []
    memory = checkpointer(tmp_path, report=said.append)
    fallocate = os.posix_fallocate

    def full(*args):
        raise OSError(28, "No space left on device")

    for step, call in enumerate((full, fallocate, fallocate, fallocate), 1):
        monkeypatch.setattr(os, "posix_fallocate", call)
        memory.save(step, pieces_of(step, 3, 0, 1), {"step": step})
        memory.wait()
        assert memory_slot.newest_step(tmp_path / "home") == (None if step == 1 else step)
    memory.close()
    assert said == ["step 1 could not be saved in memory: rank 0: No space left on device"]


def test_a_rank_whose_tensors_others_save_keeps_an_empty_part(tmp_path):
    """Without ZeRO the second replica is such a rank: the first saves all tensors."""
    said = []
    memory = checkpointer(tmp_path, report=said.append)
    whole = pieces_of(1, 3, 0, 1)
    state = {name: [replace(piece, primary=False) for piece in pieces] for name, pieces in whole.items()}
    memory.save(1, state, {"step": 1})
    memory.wait()
    assert said == [] and memory_slot.newest_step(tmp_path / "home") == 1
    memory.close()


def test_memory_is_had_before_it_is_needed(tmp_path, monkeypatch):
    """Getting it takes longer than writing it: the first save finds one slot, and the second the other."""
    had = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (had.append(threading.current_thread()), fallocate(*args)))
    memory = checkpointer(tmp_path, state=pieces_of(1, 3, 0, 1))
    assert had == [threading.main_thread()]
    for step in (1, 2, 3):
        memory.save(step, pieces_of(step, 3, 0, 1), {"step": step})
    memory.close()
    assert len(had) == 2 and had[1] is not threading.main_thread()
