import json
import os
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from shoal.base.errors import UsageError
from shoal.engine.data import readers
from shoal.engine.data.corpus import check_read, open_corpus
from shoal.engine.data.readers import Skipped
from shoal.spec.config import DataConfig


def documents(**settings) -> list[str]:
    return list(open_corpus(DataConfig(**settings)).documents(Skipped()))


def test_the_standard_library_is_there_and_in_order():
    library = open_corpus(DataConfig())
    paths = [file.path for file in library.files]
    texts = list(library.documents(Skipped()))
    assert 5e6 < library.size < 30e6
    assert sum("def loads(s, *, cls=None" in text for text in texts) == 1
    assert not any("site-packages" in path.parts or "test" in path.parts for path in paths)
    assert paths == sorted(paths)


def test_what_nothing_reads_is_refused_of_what_begins_alone():
    """Runs began with such settings, and must go on."""
    config = DataConfig(source="stdlib", paths=("unread",), dataset="un/read")
    assert open_corpus(config).name == "Python's standard library"
    with pytest.raises(UsageError, match=r"data.paths = \('unread',\) with data.source = 'stdlib', which does not"):
        check_read(config)
    for source, settings in (("text", {"paths": ("a",)}), ("hub", {"dataset": "a/b", "field": "b"}), ("synthetic", {})):
        check_read(DataConfig(source=source, **settings))


def test_files_folders_and_globs(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.md", ".hidden/d.txt"):
        (tmp_path / name).write_text(name)
    assert documents(source="text", paths=[str(tmp_path)]) == ["a.txt", "b.txt", "deep/c.md"]
    assert documents(source="text", paths=[f"{tmp_path}/**/*.md", f"{tmp_path}/b.txt"]) == ["deep/c.md", "b.txt"]
    assert documents(source="text", paths=[f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"]) == ["a.txt", "b.txt"]


def test_a_named_format_is_read_whatever_the_suffix_of_a_file_and_only_it_in_a_folder(tmp_path):
    (tmp_path / "lines.log").write_text(json.dumps({"text": "one"}))
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "two"}))
    (tmp_path / "state.json").write_text("{}")
    assert documents(source="jsonl", paths=[f"{tmp_path}/lines.log", str(tmp_path)]) == ["one", "two"]


def test_line_ends_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert documents(source="text", paths=[str(tmp_path)]) == ["one\r\ntwo\rthree\n"]


def test_long_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_TEXT", 100)
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "long.txt").write_text(text)
    pieces = documents(source="text", paths=[str(tmp_path)])
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") and len(piece) < 120 for piece in pieces)


def test_jsonl(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "tw\\u00f6", "id": 3}\n')
    (tmp_path / "ignored.txt").write_text("not JSON")
    assert documents(source="jsonl", paths=[str(tmp_path)], field="body") == ["one", "twö"]


def test_parquet(tmp_path):
    texts = [f"document {i}" for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"n": range(3000), "body": texts}), tmp_path / "a.parquet")
    assert documents(source="parquet", paths=[str(tmp_path)], field="body") == texts


def test_hub_reads_a_dataset(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    config = DataConfig(source="hub", dataset=str(tmp_path), field="body")
    assert list(open_corpus(config).documents(Skipped())) == ["one", "two"]
    assert open_corpus(config).fingerprint(tmp_path / "memo") == open_corpus(config).fingerprint(tmp_path / "memo")
    with pytest.raises(UsageError, match="did you mean 'body'"):
        list(open_corpus(config.model_copy(update={"field": "boddy"})).documents(Skipped()))


class Rows:
    """Stand-in for `datasets.DatasetBuilder` and its `IterableDataset`, with what the corpus uses of them."""

    dataset_name, config_id = "name", "default"

    def __init__(self, rows: list[dict], version: str = "f"):
        self.rows, self.hash = rows, version

    def as_streaming_dataset(self, split: str) -> "Rows":
        if split != "train":
            raise ValueError(f"unknown split {split}")
        return self

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])

    def select_columns(self, name: str) -> "Rows":
        return Rows([{name: row[name]} for row in self.rows])

    def __iter__(self):
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch):
    """A package `datasets` that knows one dataset in two configurations; the loads that it saw."""
    loads = []
    known = {
        ("owner/name", None): Rows([{"n": 1, "body": "one"}, {"n": 2, "body": "tw\u00f6"}], "a"),
        ("owner/name", "en"): Rows([{"n": 1, "body": "three"}, {"n": 2, "body": None}], "b"),
    }

    def load_dataset_builder(path, configuration):
        loads.append((path, configuration))
        if (path, configuration) not in known:
            raise FileNotFoundError("no such dataset")
        return known[path, configuration]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=load_dataset_builder))
    return loads


def test_hub_opens_the_dataset_once(hub, tmp_path):
    found = open_corpus(DataConfig(source="hub", dataset="owner/name", field="body"))
    assert list(found.documents(Skipped())) == list(found.documents(Skipped())) == ["one", "tw\u00f6"]
    found.fingerprint(tmp_path / "memo")
    assert hub == [("owner/name", None)]


def test_hub_fingerprints_tell_configurations_and_fields_apart(hub, tmp_path):
    names = [("owner/name", "body"), ("owner/name:en", "body"), ("owner/name", "n"), ("owner/name", "body")]
    prints = [
        open_corpus(DataConfig(source="hub", dataset=name, field=field)).fingerprint(tmp_path / "memo")
        for name, field in names
    ]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "owner/name", "field": "boddy"}, "did you mean 'body'"),
        ({"dataset": "owner/name:en", "field": "body"}, "dataset owner/name:en, row 1"),
        ({"dataset": "owner/none", "field": "body"}, "'owner/none' cannot be loaded: no such dataset"),
    ],
)
def test_hub_says_what_is_wrong(hub, settings, message):
    with pytest.raises(UsageError, match=message):
        documents(source="hub", **settings)


def test_hub_without_the_extra_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"shoal\[hub\]"):
        documents(source="hub", dataset="owner/name")


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("jsonl", b'{"messages": []}\n', r"line 1: no field 'text' .data\.field.; allowed: messages; data\.chat reads"),
        ("jsonl", b'{"text": "a"}\n{"txet": "b"}\n', r"bad\.jsonl, line 2: no field 'text'.*did you mean 'txet'"),
        ("jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl, line 2: not JSON"),
        ("jsonl", b'{"text": "a"}\n["b"]\n', r"bad\.jsonl, line 2: a list"),
        ("jsonl", b'{"text": 3}\n', r"bad\.jsonl, line 1: .* int, not text"),
        ("jsonl", b'{"text": "a\\ud800"}\n', r"bad\.jsonl, line 1: .* not Unicode"),
        ("jsonl", b'{"text": "\xff"}\n', r"bad\.jsonl, line 1: not JSON"),
        ("text", b"fine\n\xff\xfe", r"bad\.text is not UTF-8"),
        ("parquet", b"PAR1 nonsense", r"bad\.parquet is not a parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, source, content, message):
    path = tmp_path / f"bad.{source}"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        documents(source=source, paths=[str(path)])


def test_parquet_names_columns_and_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", None]}), path)
    with pytest.raises(UsageError, match=r"a\.parquet: no field 'text'.*body"):
        documents(source="parquet", paths=[str(path)])
    with pytest.raises(UsageError, match=r"a\.parquet, row 1: .* NoneType"):
        documents(source="parquet", paths=[str(path)], field="body")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "text"}, r"data\.paths is empty"),
        ({"source": "text", "paths": ["no/such/*.txt"]}, r"'no/such/\*\.txt': no such file"),
        ({"source": "hub"}, r"data\.dataset is empty"),
        ({"source": "synthetic"}, "no documents"),
    ],
)
def test_nothing_to_read_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        open_corpus(DataConfig(**settings))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no \.jsonl"):
        open_corpus(DataConfig(source="jsonl", paths=[str(tmp_path)]))


def test_the_fingerprint_follows_content_not_place(tmp_path, monkeypatch):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(json.dumps({"text": "same"}))

    def fingerprint(folder, **settings):
        config = DataConfig(source="jsonl", paths=[str(tmp_path / folder)], **settings)
        return open_corpus(config).fingerprint(tmp_path / "memo")

    first = fingerprint("here")
    assert first == fingerprint("there")
    with monkeypatch.context() as patch:
        patch.setattr("shoal.engine.data.corpus.open_raw", pytest.fail)  # it is remembered
        assert first == fingerprint("here")
    assert first != fingerprint("here", field="body")
    changed = tmp_path / "here" / "a.jsonl"
    changed.write_text(json.dumps({"text": "some"}))  # of the same length
    os.utime(changed, ns=(1, 1))
    assert fingerprint("here") != first


def test_the_fingerprint_tells_which_of_several_files_has_which_format(tmp_path):
    for name in ("a.txt", "a.jsonl", "b.txt", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": "same"}))
    pairs = [("a.txt", "b.jsonl"), ("a.jsonl", "b.txt"), ("a.txt", "b.txt"), ("a.jsonl", "b.jsonl")]
    corpora = [open_corpus(DataConfig(paths=[str(tmp_path / name) for name in pair])) for pair in pairs]
    assert len({corpus.fingerprint(tmp_path / "memo") for corpus in corpora}) == len(pairs)
    assert [corpus.size is not None for corpus in corpora] == [False, False, True, False]
