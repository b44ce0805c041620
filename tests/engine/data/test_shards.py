import json
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.data import shards
from shoal.engine.data.prepare import train_tokenizer
from shoal.engine.data.shards import assign_split, open_shards
from shoal.engine.data.token_stream import CacheManifest, TokenStream
from shoal.engine.data.tokenizer import BytesTokenizer, load_tokenizer, train_bpe
from shoal.spec.config import DataConfig

BYTES = BytesTokenizer()
END = BYTES.end_of_document


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """400 short documents, in a cache of their own."""
    folder = tmp_path / "text"
    folder.mkdir()
    with open(folder / "all.jsonl", "w") as file:
        for i in range(400):
            file.write(json.dumps({"text": f"document {i}\n" * (i % 7)}) + "\n")
    return DataConfig(source="jsonl", paths=[str(folder)], cache=tmp_path / "cache", validation_fraction=0.2)


def streams(config, tokenizer=BYTES) -> dict[str, TokenStream]:
    folder = open_shards(config, tokenizer)
    return {split: TokenStream(folder, split, tokenizer.end_of_document) for split in shards.SPLITS}


def documents_of(stream, tokenizer=BYTES) -> list[str]:
    ids = stream.read(0, len(stream))
    ends = np.flatnonzero(ids == tokenizer.end_of_document)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(piece) for piece in np.split(ids, ends + 1)[:-1]]


def expected(config) -> dict[str, list[str]]:
    texts = [f"document {i}\n" * (i % 7) for i in range(400)]
    return {
        split: [t for t in texts if t and assign_split(t.encode(), config.validation_fraction) == split]
        for split in shards.SPLITS
    }


def test_the_streams_hold_every_document_once_and_in_order(config):
    for split, stream in streams(config).items():
        assert documents_of(stream) == expected(config)[split]
        assert stream.info.documents == len(expected(config)[split]) > 0


@pytest.mark.parametrize("texts", [
    ["".join(f"line {i}\n" for i in range(2000))],  # a book in one file
    ["x" * 9000],
    *([text for text in (f"{i}\n" * 50 for i in range(200)) if assign_split(text.encode(), 0.1) == side][:8]
      for side in shards.SPLITS),
])  # fmt: skip
def test_the_end_of_the_text_is_held_out_if_no_document_is(texts, tmp_path):
    (tmp_path / "corpus").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "corpus" / f"{i:02}.txt").write_text(text)
    config = DataConfig(paths=(str(tmp_path / "corpus"),), cache=tmp_path / "cache", validation_fraction=0.1)
    read = []
    with patch("shoal.engine.data.prepare.train_bpe", lambda documents, *_: read.extend(documents)):
        train_tokenizer(config, vocab_size=300, out=tmp_path / "bpe.json")
    train, held = (documents_of(stream) for stream in streams(config).values())
    assert train and held and read == train
    if len(texts) == 1:
        assert train + held == [train[0], held[0]] and train[0] + held[0] == texts[0]
        assert 0.05 < len(held[0]) / len(texts[0]) < 0.15
        assert "\n" not in texts[0] or train[0].endswith("\n")
    else:
        assert sorted("".join(train + held)) == sorted("".join(texts))


def test_a_document_that_encodes_to_its_end_is_refused(tmp_path):
    """A unigram model has the end in its own vocabulary, and finds it in text."""
    from tokenizers import Tokenizer, models, trainers

    unigram = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(vocab_size=30, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    unigram.train_from_iterator(["the cat sat"] * 50, trainer)
    unigram.save(str(tmp_path / "unigram.json"))
    tokenizer = load_tokenizer(str(tmp_path / "unigram.json"))
    for text, refused in (("the cat sat", False), ("the </s> sat", True)):
        text_file = tmp_path / f"{refused}.txt"
        text_file.write_text(text)
        config = DataConfig(source="text", paths=[str(text_file)], cache=tmp_path / "cache")
        if not refused:
            assert open_shards(config, tokenizer).is_dir()
            continue
        with pytest.raises(UsageError, match=r"begins with 'the </s> sat' has, after '.+', text"):
            open_shards(config, tokenizer)
    assert len(list((tmp_path / "cache" / "shards").glob("*/manifest.json"))) == 1


def test_with_a_trained_tokenizer_too(config, tmp_path):
    bpe = train_bpe([f"document {i}\n" for i in range(400)], 270, tmp_path / "tokenizer.json")
    for split, stream in streams(config, bpe).items():
        assert documents_of(stream, bpe) == expected(config)[split]
        assert stream.info.bytes == sum(len(t) for t in expected(config)[split])


def test_large_vocabularies_take_four_bytes(config):
    class Wide(BytesTokenizer):
        vocab_size = 70_001
        end_of_document = 70_000
        fingerprint = "wide"

    stream = streams(config, Wide())["train"]
    assert stream.manifest.dtype == "<u4"
    assert documents_of(stream, Wide()) == expected(config)["train"]


def test_many_shards_read_as_one_stream(config, monkeypatch):
    whole = streams(config)["train"]
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    cut = streams(config)["train"]
    assert len(cut.info.shards) == -(-len(whole) // 1000)
    assert {shard.tokens for shard in cut.info.shards[:-1]} == {1000}
    ids = whole.read(0, len(whole))
    np.testing.assert_array_equal(cut.read(0, len(cut)), ids)
    for start, stop in [(0, 0), (999, 1001), (1000, 2000), (500, 3500), (len(ids) - 1, len(ids)), (len(ids), len(ids))]:
        np.testing.assert_array_equal(cut.read(start, stop), ids[start:stop])
    with pytest.raises(IndexError):
        cut.read(len(ids), len(ids) + 1)


@given(contents=st.lists(st.binary(min_size=1), min_size=1), fraction=st.floats(0.01, 0.49))
def test_the_split_only_grows_with_the_fraction(contents, fraction):
    for content in contents:
        if assign_split(content, fraction) == "validation":
            assert assign_split(content, fraction + 0.01) == "validation"


def test_the_split_takes_the_given_part():
    chosen = sum(assign_split(f"{i}".encode(), 0.1) == "validation" for i in range(20_000))
    assert 1800 < chosen < 2200


def test_the_cache_is_reused_and_keyed_by_content(config, tmp_path, monkeypatch):
    first = open_shards(config, BYTES)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "text" / "all.jsonl").read_bytes())
    elsewhere = config.model_copy(update={"paths": (str(moved),)})
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_build", lambda *args: pytest.fail("built again"))
        assert open_shards(config, BYTES) == first == open_shards(elsewhere, BYTES)
    moved.write_text('{"text": "something else"}')
    assert open_shards(elsewhere, BYTES) != first
    assert open_shards(config.model_copy(update={"validation_fraction": 0.3}), BYTES) != first


@pytest.mark.parametrize("texts, digest", [
    ({"book.txt": "".join(f"line {i}\n" for i in range(2000))}, "2 6bc1bace42fadbe1"),
    ({f"{i:02}.txt": f"{i}\n" * 50 for i in range(40)}, "2 4488fb32d474da46"),
], ids=["one document", "several documents"])  # fmt: skip
def test_other_files_have_another_format(texts, digest, tmp_path):
    """A cache that an older version filled is read as long as `_FORMAT` stays."""
    (tmp_path / "corpus").mkdir()
    for name, text in texts.items():
        (tmp_path / "corpus" / name).write_text(text)
    config = DataConfig(paths=(str(tmp_path / "corpus"),), cache=tmp_path / "cache", validation_fraction=0.1)
    files = sorted(open_shards(config, BYTES).glob("*.bin"))
    contents = b"".join(path.name.encode() + path.read_bytes() for path in files)
    assert f"{shards._FORMAT} {xxhash.xxh3_64_hexdigest(contents)}" == digest, "increment _FORMAT, and write it here"


def test_a_changed_byte_is_found_by_name(config):
    folder = open_shards(config, BYTES)
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[1234] ^= 1
    path.write_bytes(content)
    TokenStream(folder, "validation", END)
    with pytest.raises(UsageError, match=r"train-00000\.bin: its checksum differs"):
        TokenStream(folder, "train", END)


@pytest.mark.parametrize(("kept", "why"), [(0, "empty"), (1, "multiple"), (1000, "500 ids, but .* were written")])
def test_a_short_or_odd_shard_is_found_by_name(config, kept, why):
    folder = open_shards(config, BYTES)
    path = folder / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=rf"damaged shard .*train-00000\.bin: .*{why}"):
        TokenStream(folder, "train", END)


def test_missing_files_are_found_by_name(config):
    folder = open_shards(config, BYTES)
    (folder / "train-00000.bin").unlink()
    with pytest.raises(UsageError, match=r"train-00000\.bin"):
        TokenStream(folder, "train", END)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=r"manifest\.json"):
        TokenStream(folder, "validation", END)


def test_ids_outside_the_vocabulary_are_refused(config):
    class Liar(BytesTokenizer):
        vocab_size = 100
        end_of_document = 99
        fingerprint = "liar"

    with pytest.raises(UsageError, match=r"liar: token id \d+ is outside the vocabulary of 100"):
        open_shards(config, Liar())
    assert not list((config.cache / "shards").glob("*.staging"))

    folder = open_shards(config, BYTES)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 257', '"vocab_size": 200'))
    with pytest.raises(UsageError, match=r"train-00000\.bin: token id 256 is outside the vocabulary of 200"):
        TokenStream(folder, "train", END)


def test_an_error_while_building_leaves_nothing(config, tmp_path):
    (tmp_path / "text" / "bad.jsonl").write_text('{"txet": 1}')
    with pytest.raises(UsageError, match=r"bad\.jsonl, line 1"):
        open_shards(config, BYTES)
    assert [path.suffix for path in (config.cache / "shards").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"data\.cache = .*file/cache"):
        open_shards(config.model_copy(update={"cache": tmp_path / "file" / "cache"}), BYTES)


BUILD = """
import sys, time
from pathlib import Path
from unittest.mock import patch
from shoal.spec.config import DataConfig
from shoal.engine.data import shards
from shoal.engine.data.prepare import train_tokenizer
from shoal.engine.data.token_stream import TokenStream
from shoal.engine.data.tokenizer import BytesTokenizer

build, log = shards._build, Path(sys.argv[3])
def logged(*args):
    log.open("a").write("build\\n")
    time.sleep(float(sys.argv[4]))
    build(*args)
    print("built", flush=True)
shards._build = logged
config = DataConfig(source="jsonl", paths=[sys.argv[1]], cache=sys.argv[2], validation_fraction=0.2)
print(TokenStream(shards.open_shards(config, BytesTokenizer()), "train", 256).read(0, 5).tolist())
assert "torch" not in sys.modules
"""


def start(config: DataConfig, log: Path, wait: float) -> subprocess.Popen:
    arguments = [sys.executable, "-c", BUILD, config.paths[0], str(config.cache), str(log), str(wait)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_of_many_processes_at_once_one_builds(config, tmp_path):
    processes = [start(config, tmp_path / "log", 0.3) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert len(set(outputs)) == 1
    assert [process.returncode for process in processes] == [0] * 3
    assert (tmp_path / "log").read_text() == "build\n"


def test_without_locks_the_first_rename_wins(config, monkeypatch):
    def refuse(*args):
        raise OSError("no locks")

    monkeypatch.setattr(shards.fcntl, "flock", refuse)
    build = shards._build

    def build_twice(*args):
        build(*args)
        build(*args)

    monkeypatch.setattr(shards, "_build", build_twice)
    assert documents_of(streams(config)["train"]) == expected(config)["train"]
    assert not list((config.cache / "shards").glob("*.staging"))


def test_a_killed_build_is_swept_away_by_the_next(config, tmp_path, monkeypatch):
    killed = start(config, tmp_path / "log", 60)
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    key = next((config.cache / "shards").glob("*.lock")).stem
    (config.cache / "shards" / f"{key}.left.staging").mkdir()  # what a kill a little later leaves
    assert CacheManifest.read(open_shards(config, BYTES)).vocab_size == 257
    assert not list((config.cache / "shards").glob("*.staging"))


def test_progress_is_a_plain_line_where_there_is_no_terminal(config, capfd):
    open_shards(config, BYTES, progress=True)
    assert capfd.readouterr().err.startswith("tokenising ")
    open_shards(config.model_copy(update={"validation_fraction": 0.4}), BYTES)
    assert capfd.readouterr().err == ""
