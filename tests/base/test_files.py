"""Small files: written whole, or what was there stays as it was."""

import os

import pytest

from shoal.base.files import write_atomically


def test_what_was_there_keeps_its_mode_and_a_link_its_target(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o664)
    (tmp_path / "link").symlink_to("a")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o664
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", "newer")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_what_should_be_new_is_in_place_of_nothing(tmp_path):
    write_atomically(tmp_path / "a", "first", new=True)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", "second", new=True)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "first"
