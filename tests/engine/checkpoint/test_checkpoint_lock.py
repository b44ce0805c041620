"""A folder belongs to one run at a time, on disks and file systems of all kinds."""

import errno
import fcntl
import shutil
import subprocess
import sys

import pytest
import torch

from shoal.engine.checkpoint import Checkpointer, CheckpointError, newest, save, storage
from tests.engine.checkpoint.cuts import whole


def weights(value: float):
    return whole({"w": torch.full((4, 4), value)})


def locked(folder) -> bool:
    """Whether another process finds the folder in use."""
    words = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run([sys.executable, "-S", "-c", words, folder / ".lock"], capture_output=True, text=True)
    assert not done.returncode or "BlockingIOError" in done.stderr
    return bool(done.returncode)


def saver(folder, **options) -> Checkpointer:
    return Checkpointer(folder, group=None, keep=1, asynchronous=True, **options)


def test_a_folder_is_locked_once_it_can_be_written_until_the_end_also_of_a_failed_save(tmp_path):
    notes = []
    (tmp_path / "run").write_text("a disk that is not there yet")
    checkpointer = saver(tmp_path / "run", report=notes.append)
    assert "cannot be written" in notes.pop()
    with pytest.raises(CheckpointError, match="saving step 1 failed"):
        checkpointer.save(1, weights(1), {}, block=True)
    (tmp_path / "run").unlink()
    checkpointer.save(2, weights(2), {}, block=True)
    assert locked(tmp_path / "run") and not notes
    checkpointer.save(3, weights(3), {"rng": torch.ones(1)})
    with pytest.raises(CheckpointError, match="not JSON"):
        checkpointer.close()
    assert not locked(tmp_path / "run")


def test_a_folder_that_was_unmounted_or_deleted_is_made_again_with_a_note(tmp_path):
    notes = []
    checkpointer = saver(tmp_path, report=notes.append)
    checkpointer.save(1, weights(1), {}, block=True)
    shutil.rmtree(tmp_path)
    checkpointer.save(2, weights(2), {}, block=True)
    checkpointer.save(3, weights(3), {}, block=True)
    assert notes == [f"{tmp_path} was gone and is made again: is its disk still mounted?"]
    assert newest(tmp_path).step == 3 and locked(tmp_path)
    checkpointer.close()


def test_a_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch):
    """Lustre without its option and NFS without its daemon have no locks. A disk that fails is not used."""
    error = OSError(errno.EIO, "it fails")

    def lockf(*_):
        raise error

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(CheckpointError, match=r"cannot be written into .*: it fails"):
        saver(tmp_path, fresh=True)
    error = OSError(errno.ENOLCK, "No locks available")
    checkpointer = saver(tmp_path, fresh=True)
    checkpointer.save(1, weights(1), {})
    checkpointer.close()
    assert newest(tmp_path).step == 1


def test_a_folder_is_checked_before_a_run_starts(tmp_path):
    checkpointer = saver(tmp_path)
    checkpointer.save(1, weights(1), {}, block=True)
    save.check_folder(tmp_path, fresh=False)
    save.check_folder(tmp_path / "new" / "run", fresh=True)
    with pytest.raises(CheckpointError, match="already holds step-00000001"):
        save.check_folder(tmp_path, fresh=True)
    with pytest.raises(CheckpointError, match="cannot be written into"):
        save.check_folder(tmp_path / "step-00000001" / "manifest.json", fresh=False)
    with pytest.raises(CheckpointError, match="cannot be written into"):
        saver(tmp_path / ".lock", fresh=True)
    checkpointer.close()


def test_a_lock_of_a_process_that_is_ending_is_waited_for(tmp_path):
    script = "import fcntl, sys, time; file = open(sys.argv[1], 'a')"
    script += "; fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True)"
    words = [sys.executable, "-c", f"{script}; time.sleep(0.5)", str(tmp_path / "lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        held = storage.lock(tmp_path / "lock")
    assert held is not None
    held.close()
