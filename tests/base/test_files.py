"""Small files: only regular ones are read, no link is written through, and what was there stays as it was."""

import os
import socket
from unittest.mock import Mock

import pytest

from shoal.base.errors import UsageError
from shoal.base.files import (
    LARGEST,
    check_writable,
    make_folder,
    open_to_append,
    read_bytes,
    read_csv,
    read_json_lines,
    read_tail,
    read_toml,
    write_atomically,
)
from shoal.base.journal import Journal


@pytest.fixture
def kinds(tmp_path):
    """Paths by kind, all of which are no regular file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield {name: tmp_path / name for name in ("pipe", "folder", "zero", "loop", "nowhere", "socket", "absent")}


def test_what_is_no_regular_file_is_refused_and_waits_for_nobody(kinds):
    says = {
        "pipe": "it is a pipe", "folder": "it is a folder", "zero": "it is a device", "loop": "Too many levels",
        "nowhere": "no such file", "socket": "No such device", "absent": "no such file",
    }  # fmt: skip
    for name, path in kinds.items():
        for read in (read_bytes, read_toml, read_csv):
            with pytest.raises(UsageError) as error:
                read(path)
            assert says[name] in str(error.value) and str(path) in str(error.value)
        assert read_tail(path, 9) == ""
        if "no such" not in says[name]:
            with pytest.raises(UsageError, match=says[name]):
                read_json_lines(path, dict, "line")
    for name in ("a\0b", "\udcff", "x" * 300):
        with pytest.raises(UsageError):
            read_bytes(name)


def test_a_file_of_a_similar_name_is_named(tmp_path):
    (tmp_path / "quickstart.toml").touch()
    (tmp_path / "quickstart.html").touch()
    (tmp_path / "link.toml").symlink_to("absent")
    (tmp_path / "folder.toml").mkdir()
    says = {
        "quickstrat.toml": f"quickstrat.toml; did you mean '{tmp_path}/quickstart.toml'?", "other.toml": "other.toml",
        "link.toml": "link.toml", "folders.toml": "folders.toml",
        "none/a.toml": f"a.toml\n  There is no folder {tmp_path}/none.",
    }  # fmt: skip
    for name, end in says.items():
        with pytest.raises(UsageError) as error:
            read_bytes(tmp_path / name)
        assert str(error.value) == f"no such file: {(tmp_path / name).parent}/{end}"


def test_a_file_too_large_is_not_read_into_memory(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 42)
    for read in (read_bytes, lambda path: read_json_lines(path, dict, "line")):
        with pytest.raises(UsageError, match=r"MiB"):
            read(tmp_path / "sparse")
    assert len(read_tail(tmp_path / "sparse", 100)) == 100
    assert LARGEST <= 64 << 20


def test_no_link_is_written_through(kinds, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    kinds["link"] = tmp_path / "link"
    kinds["link"].symlink_to(outside)
    del kinds["absent"]
    before = {path: path.lstat() for path in kinds.values()}
    for name, path in kinds.items():
        for write in (lambda path: write_atomically(path, "mine"), lambda path: open_to_append(path).write(b"mine")):
            with pytest.raises(OSError):
                write(path)
        Journal(path, lambda said: None).append("mine\n")
        with pytest.raises(UsageError, match=r"link|folder|pipe"):
            check_writable(path, "--out")
        if name in ("link", "zero", "loop"):
            (tmp_path / f"{name}.d").symlink_to(path)
    assert outside.read_text() == "theirs" and not (tmp_path / "absent").exists()
    assert {path: path.lstat() for path in kinds.values()} == before
    (tmp_path / "elsewhere").symlink_to(kinds["folder"])
    with pytest.raises(OSError, match="symbolic link"):
        make_folder(tmp_path / "elsewhere")
    assert make_folder(tmp_path / "new" / "folder").is_dir()


def test_a_planted_link_at_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "outside").write_text("theirs")
    (tmp_path / f"a.{os.getpid()}.partial").symlink_to("outside")
    write_atomically(tmp_path / "a", b"mine")
    assert (tmp_path / "a").read_text() == "mine" and (tmp_path / "outside").read_text() == "theirs"


def test_what_was_there_keeps_its_mode(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o664)
    write_atomically(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o664
    assert os.listdir(tmp_path) == ["a"]


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", "newer")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("links", [True, False])
def test_what_should_be_new_is_in_place_of_nothing(links, tmp_path, monkeypatch):
    """Also on a file system without hard links."""
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    write_atomically(tmp_path / "a", "first", new=True)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", "second", new=True)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "first"


def test_damaged_lines_are_left_out_and_reported_once(tmp_path, capsys):
    path = tmp_path / "lines"
    deep = b"[" * 100_000
    path.write_bytes(b'{"a": 1}\n\xff\n' + deep + b'\n{"a": ' + b"9" * 9000 + b'}\n{}\n\0\n{"a": 2}\n{"a": 3')
    assert read_json_lines(path, lambda line: line["a"], "thing") == [1, 2]
    assert capsys.readouterr().err == f"{path}: left out line 2, which is no thing, and 4 more.\n"
    path.write_bytes(b"{}\n{}\n")
    with pytest.raises(UsageError, match=r"line 1: it is no thing, as are all others.\n  Move the file elsewhere."):
        read_json_lines(path, lambda line: line["a"], "thing")


@pytest.mark.parametrize("text", ["a" + ".a" * 20_000 + " = 1\n", "[a" + ".a" * 20_000 + "]\n", "a = " + "[" * 20_000])
def test_a_table_nested_too_deep(tmp_path, text):
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(UsageError, match="nested too deep"):
        read_toml(tmp_path / "deep.toml")
