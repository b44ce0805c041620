"""The same text in every format gives the same token ids."""

import json
import random
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from shoal.base.errors import UsageError
from shoal.engine.data.corpus import open_corpus
from shoal.engine.data.files import find_files
from shoal.engine.data.open_stream import open_stream
from shoal.engine.data.prepare import train_tokenizer
from shoal.engine.data.readers import Skipped
from shoal.engine.data.shards import open_shards
from shoal.engine.data.token_stream import CacheManifest, TokenStream
from shoal.engine.data.tokenizer import BytesTokenizer
from shoal.spec.config import DataConfig

TEXTS = [f"Dokument {i}: Grüße\n" * (i % 5 + 1) for i in range(60)]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def ids(cache: Path, split="train", **settings) -> list[int]:
    config = DataConfig(cache=cache, validation_fraction=0.2, **settings)
    stream = TokenStream(open_shards(config, BytesTokenizer()), split, BytesTokenizer.end_of_document)
    return stream.read(0, len(stream)).tolist()


def write_text(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.{'txt' if i % 2 else 'md'}").write_text(text)


def write_jsonl(folder):
    (folder / "all.jsonl").write_bytes(LINES)


def compressed(codec, suffix):
    def write(folder):
        with pyarrow.CompressedOutputStream(str(folder / f"all.jsonl{suffix}"), codec) as file:
            file.write(LINES)

    return write


def write_compressed_text(folder):
    for i, text in enumerate(TEXTS):
        with pyarrow.CompressedOutputStream(str(folder / f"{i:03}.txt.zst"), "zstd") as file:
            file.write(text.encode())


def write_parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:25]}), folder / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"n": range(35), "text": TEXTS[25:]}), folder / "b.parquet")


def write_mixed(folder):
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.jsonl").write_bytes(b"".join(LINES.splitlines(keepends=True)[1:30]))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[30:]}), folder / "c.parquet")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")


def saved_dataset(folder):
    import datasets

    shuffled = sorted(range(60), key=lambda i: random.Random(i).random())
    rows = [None] * 60
    for place, i in enumerate(shuffled):
        rows[i] = {"text": TEXTS[place], "n": i}
    datasets.Dataset.from_list(rows).select(shuffled).save_to_disk(folder, num_shards=3)


def saved_dict(folder):
    import datasets

    splits = {"train": datasets.Dataset.from_dict({"text": TEXTS}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.DatasetDict(splits).save_to_disk(folder)


@pytest.mark.parametrize("write", [
    write_text, write_compressed_text, write_jsonl, compressed("gzip", ".gz"), compressed("zstd", ".zst"),
    compressed("bz2", ".bz2"), write_parquet, write_mixed, saved_dataset, saved_dict,
])
def test_every_format_gives_the_same_ids(tmp_path, write):
    (folder := tmp_path / "corpus").mkdir()
    write(folder)
    (reference := tmp_path / "reference").mkdir()
    write_jsonl(reference)
    expected = ids(tmp_path / "cache", source="jsonl", paths=[str(reference)])
    assert len(expected) > 500
    assert ids(tmp_path / "cache", paths=[str(folder)]) == expected
    assert ids(tmp_path / "cache", paths=[f"file://{folder}"]) == expected


@pytest.mark.parametrize("write", [write_text, write_jsonl, compressed("zstd", ".zst"), write_parquet, saved_dict])
def test_urls_give_the_same_ids_as_paths(tmp_path, write):
    (folder := tmp_path / "corpus").mkdir()
    write(folder)
    store = fsspec.filesystem("memory")
    place = f"/{tmp_path.name}"
    store.put(f"{folder}/", f"{place}/corpus/", recursive=True)
    try:
        expected = ids(tmp_path / "cache", paths=[str(folder)])
        assert ids(tmp_path / "cache", paths=[f"memory:/{place}/corpus"]) == expected
        if write is not saved_dict:
            assert ids(tmp_path / "cache", paths=[f"memory:/{place}/*/*"]) == expected
        with pytest.raises(UsageError, match=r"memory://.*none': no such file"):
            ids(tmp_path / "cache", paths=[f"memory:/{place}/none"])
    finally:
        store.rm(place, recursive=True)


def test_a_file_written_again_in_a_store_has_another_key(tmp_path):
    store = fsspec.filesystem("memory")
    config = DataConfig(paths=[f"memory://{tmp_path.name}.jsonl"])
    prints = []
    for text in ("one", "two"):
        store.pipe(f"/{tmp_path.name}.jsonl", json.dumps({"text": text}).encode())
        prints += [open_corpus(config).fingerprint(tmp_path / "memo") for _ in range(2)]
    store.rm(f"/{tmp_path.name}.jsonl")
    assert prints[0] == prints[1] != prints[2] == prints[3]


def test_datasets_are_streamed(tmp_path):
    """A local folder of parquet files is a dataset as one on the hub is; other splits are found by name."""
    (folder := tmp_path / "corpus" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "train-00000.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:9]}), folder / "test-00000.parquet")
    (reference := tmp_path / "reference").mkdir()
    write_jsonl(reference)
    expected = ids(tmp_path / "cache", paths=[str(reference)])
    found = {"dataset": str(folder.parent), "cache": tmp_path / "cache"}
    assert ids(**found) == expected
    assert len(ids(**found, dataset_split="test")) < len(expected)
    with pytest.raises(UsageError, match="cannot be loaded"):
        ids(**found, dataset_split="none")
    saved_dict(tmp_path / "saved")
    assert ids(tmp_path / "cache", dataset=str(tmp_path / "saved")) == expected


def test_the_split_of_a_saved_dataset(tmp_path):
    saved_dict(tmp_path)
    (file,) = find_files(DataConfig(paths=[str(tmp_path)], dataset_split="test"))
    assert file.path.parent.name == "test"
    with pytest.raises(UsageError, match=r"data\.dataset_split = 'tset'.*did you mean 'test'"):
        find_files(DataConfig(paths=[str(tmp_path)], dataset_split="tset"))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with pytest.raises(UsageError, match="does not describe a saved dataset"):
        find_files(DataConfig(paths=[str(tmp_path)]))


@pytest.mark.parametrize(("path", "message"), [
    ("rows.csv", r"its name has no suffix of a known format: \.txt(.|\n)*Set data\.source = 'text'"),
    ("none/*.txt", "no such file, folder or match"),
    ("empty", r"the folder holds no \.txt or "),
    ("s9://bucket/a.txt", "Install the fsspec package for s9://"),
])
def test_what_cannot_be_found_is_named(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UsageError, match=message):
        find_files(DataConfig(paths=[path if "://" in path else str(tmp_path / path)]))


def test_documents_left_out_are_counted_by_reason(tmp_path, capfd):
    good = LINES.splitlines()[:20]
    bad = [b'{"text": ""}', b'{"text": null}', b'{"text": "\xff"}', b'{"txet": "a"}', b"[1]", b'{"text": ']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good, *bad]))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_bytes(b"a\0b")
    damaged = pyarrow.compress(LINES, codec="gzip", asbytes=True)[:-20]
    (tmp_path / "d.jsonl.gz").write_bytes(damaged)
    (tmp_path / "e.parquet").write_bytes(b"PAR1 nothing")
    config = DataConfig(paths=[str(tmp_path)], cache=tmp_path / "cache", unreadable="skip", validation_fraction=0.2)
    folder = open_shards(config, BytesTokenizer(), progress=True)
    manifest = CacheManifest.read(folder)
    skipped = {reason: info.documents for reason, info in manifest.skipped.items()}
    assert skipped == {
        "empty": 1, "without text": 3, "not JSON": 2, "not UTF-8": 1, "binary files": 1, "damaged files": 2,
    }
    shown = capfd.readouterr().err
    assert "skipped 10\n" in shown and f"the first: {tmp_path}/a.jsonl, line 22: the field 'text' holds None" in shown
    stops = config.model_copy(update={"unreadable": "stop"})
    with pytest.raises(UsageError, match=r"a\.jsonl, line 22(.|\n)*data\.unreadable = 'skip'"):
        open_shards(stops, BytesTokenizer())


def test_a_copy_of_a_text_has_its_shards_and_its_own_name(tmp_path):
    found = []
    for name in ("first", "copied"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)
        config = DataConfig(cache=tmp_path / "cache", paths=[str(tmp_path / f"{name}.jsonl")])
        found.append(open_stream(config, BytesTokenizer(), "train"))
    assert found[0].contents.fingerprint == found[1].contents.fingerprint
    assert found[1].contents.corpus == str(tmp_path / "copied.jsonl") == found[1].summary()[0].partition(":")[0]


def test_several_compressed_parts_and_large_files_are_read_whole(tmp_path):
    """Parts of a compressed file may be concatenated, and are larger than a buffer."""
    text = np.random.default_rng(0).integers(97, 123, 3_000_000).astype(np.uint8).tobytes().decode()
    part = pyarrow.compress(json.dumps({"text": text}).encode() + b"\n", codec="zstd", asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(part + part)
    corpus = open_corpus(DataConfig(paths=[str(tmp_path)]))
    assert list(corpus.documents(Skipped())) == [text, text]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_token_ids_are_documents(tmp_path, suffix):
    """One has its end, one has another document in it; each counts once."""
    rows = [[*range(i, i + i % 5 + 1)] for i in range(60)] + [[7, 256], [8, 256, 9], []]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    else:
        column = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": column}), file)
    settings = {"paths": [str(file)], "field": "input_ids", "cache": tmp_path / "cache"}
    found = {split: ids(split=split, **settings) for split in ("train", "validation")}
    ended = [[*row, 256][: len(row) + (row[-1] != 256)] for row in rows if row]
    apart = {split: [row for row in ended if is_part(row, stream)] for split, stream in found.items()}
    assert found == {split: [i for row in part for i in row] for split, part in apart.items()}
    assert sum(map(len, apart.values())) == len(ended) and all(apart.values())
    folder = open_shards(DataConfig(validation_fraction=0.2, **settings), BytesTokenizer())
    stream = TokenStream(folder, "train", 256)
    assert stream.contents.bytes is None and f": {len(ended)} documents of token ids; skipped 1" in stream.summary()[0]


def is_part(row: list[int], stream: list[int]) -> bool:
    return any(stream[at : at + len(row)] == row for at in range(len(stream)))


def test_one_row_of_token_ids_is_divided(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"tokens": [*range(100)]}))
    settings = {"paths": [str(tmp_path / "one.jsonl")], "field": "tokens", "cache": tmp_path / "cache"}
    assert ids(**settings) == [*range(80), 256] and ids(split="validation", **settings) == [*range(80, 100), 256]


@pytest.mark.parametrize(("row", "message"), [
    ([1, 300, 2], r"3 token ids that begins with \[1, 300, 2\] has the id 300.*\n  Set data.tokenizer to the one that"),
    ([1, -100], "line 1: the field 'ids' holds list, not text or a list of token ids"),
    ([1, 1.5], "not text or"), ([1, "2"], "not text or"), ([[1], [2, 3]], "not text or"),
    ([True], "not text or"), ([1 << 70], "not text or"), ([1 << 33], "not text or"),
])  # fmt: skip
def test_rows_that_are_no_token_ids_are_refused(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": row}))
    config = DataConfig(paths=[str(tmp_path / "a.jsonl")], field="ids", cache=tmp_path / "cache")
    with pytest.raises(UsageError, match=message):
        open_shards(config, BytesTokenizer())


def test_no_tokenizer_is_trained_on_token_ids(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [1, 2]}))
    with pytest.raises(UsageError, match=r"a tokenizer is trained on text(.|\n)*now it is 'ids'"):
        train_tokenizer(DataConfig(paths=[str(tmp_path / "a.jsonl")], field="ids"), out=tmp_path / "t.json")
