"""Files of checkpoints: written whole on any disk, and moved in a store such that one copy is always whole."""

import io
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from shoal.base.addresses import to_path
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, storage, verify
from tests.engine.checkpoint.bucket import Bucket, address
from tests.engine.checkpoint.cuts import cut, write_checkpoint

VALUES = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(6)}


def test_a_file_is_whole_though_a_disk_takes_less_at_a_time(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(data[:3])

    monkeypatch.setattr(storage, "WRITE_BYTES", 5)
    with monkeypatch.context() as slow:
        slow.setattr(Path, "open", lambda path, mode, buffering: Slow(path, mode))
        storage.write(tmp_path / "file", [b"0123456789", b"", memoryview(b"abcdefg")])
    assert (tmp_path / "file").read_bytes() == b"0123456789abcdefg"


def test_what_is_no_folder_holds_nothing(tmp_path):
    (tmp_path / "file").touch()
    assert list_checkpoints(tmp_path / "file") == [] and not storage.exists(tmp_path / "file" / "manifest.json")


@pytest.mark.parametrize("how", ["link", "pipe"])
def test_what_is_no_file_of_the_folder_is_not_read(tmp_path, how):
    path = write_checkpoint(tmp_path / "step-00000001", cut(Random(1), VALUES, 2))
    file = path / "rank-00001.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere") if how == "link" else os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is a link out of .* folder, or no"):
        verify(path)


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path):
    return write_checkpoint(to_path(address(tmp_path / "run")) / "step-00000001", cut(Random(1), VALUES, 2))


def test_what_others_write_into_a_store_is_seen(remote, tmp_path, monkeypatch):
    """Libraries of stores cache listings until the cache is cleared."""
    seen = {}

    def remember(name):
        ask = getattr(Bucket, name)

        def once(store, path, **options):
            if (name, path) not in seen:
                seen[name, path] = ask(store, path, **options)
            return seen[name, path]

        monkeypatch.setattr(Bucket, name, once)

    remember("ls")
    remember("info")
    monkeypatch.setattr(Bucket, "invalidate_cache", lambda store: seen.clear())
    local = tmp_path / "run" / "step-00000001"
    assert len(list_checkpoints(remote.parent)) == 1
    shutil.copytree(local, local.with_name("step-00000002"))
    assert [step for step, _ in list_checkpoints(remote.parent)] == [1, 2]
    shutil.rmtree(local)
    assert not storage.exists(remote / storage.COMMITS)
    assert storage.list_names(remote.parent) == ["step-00000002"]


@pytest.mark.parametrize("copies", range(4))
def test_a_rename_in_a_store_that_breaks_off_leaves_one_whole(remote, monkeypatch, copies):
    """A checkpoint of two files, a checksum and a manifest, of which ``copies`` are copied."""
    copy, left = Bucket.copy, iter(range(copies))
    monkeypatch.setattr(Bucket, "copy", lambda *args, **options: (next(left), copy(*args, **options)))
    new = remote.with_name("step-00000002")
    with pytest.raises(StopIteration):
        storage.rename(remote, new)
    assert [path.name for _, path in list_checkpoints(remote.parent)] == [remote.name]
    verify(remote)


def test_a_removal_from_a_store_that_breaks_off_leaves_no_checkpoint(remote, monkeypatch):
    rm = Bucket.rm

    def one(store, path, recursive=False):
        if recursive:
            raise ConnectionError("the store is gone")
        rm(store, path)

    monkeypatch.setattr(Bucket, "rm", one)
    with pytest.raises(ConnectionError):
        storage.remove(remote)
    assert list_checkpoints(remote.parent) == []
