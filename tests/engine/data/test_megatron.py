"""Files of token ids: what is written is read again, by another reader of the format too; damage is found."""

import struct
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.data import megatron
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.megatron import MegatronStream, find_prefixes, write_megatron
from shoal.engine.data.open_stream import open_stream
from shoal.engine.data.prepare import export_megatron
from shoal.engine.data.token_stream import StreamContents, reject_unknown_ids
from shoal.engine.data.tokenizer import BytesTokenizer
from shoal.spec.config import DataConfig

BYTES = BytesTokenizer()


def words(vocab_size):
    """Return what a stream reads of a tokenizer; its last id ends a document."""
    return SimpleNamespace(vocab_size=vocab_size, fingerprint="", end_of_document=vocab_size - 1)


class Documents:
    """A stream of these documents."""

    split = "train"

    def __init__(self, documents, vocab_size=70_000):
        self.ids = np.array([i for document in documents for i in document], np.int64)
        self.last = np.cumsum([len(document) for document in documents]) - 1
        self.contents = StreamContents("x", "x", vocab_size, len(documents), None, 1)

    def __len__(self):
        return len(self.ids)

    def read(self, start, stop):
        return self.ids[start:stop]

    def ends(self, ids, start):
        return np.isin(np.arange(start, start + len(ids)), self.last)


def read_index(prefix):
    """Read the documents as megatron-core 0.16 does: header, then three arrays."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    lengths = np.frombuffer(raw, np.int32, sequences, 34)
    pointers = np.frombuffer(raw, np.int64, sequences, 34 + lengths.nbytes)
    firsts = np.frombuffer(raw, np.int64, documents, 34 + lengths.nbytes + pointers.nbytes)
    assert 34 + lengths.nbytes + pointers.nbytes + firsts.nbytes == len(raw)
    kind = {4: np.int32, 8: np.uint16}[code]
    content = Path(f"{prefix}.bin").read_bytes()
    found = [np.frombuffer(content, kind, n, p).tolist() for p, n in zip(pointers, lengths, strict=True)]
    return [list(chain(*found[a:b])) for a, b in pairwise(firsts)]


def write_index(prefix, documents, *, kind="<u2", code=8, pieces=1):
    """Write documents of several sequences each, which shoal reads and does not write."""
    lengths, firsts = [], [0]
    for document in documents:
        lengths += [len(piece) for piece in np.array_split(document, pieces)]
        firsts.append(len(lengths))
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(kind).itemsize
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts)))
        for values, width in ((lengths, "<i4"), (offsets, "<i8"), (firsts, "<i8")):
            file.write(np.array(values, width).tobytes())
    np.concatenate(documents).astype(kind).tofile(f"{prefix}.bin")


@settings(max_examples=25, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=9), min_size=1, max_size=9),
       vocab_size=st.sampled_from([65_499, 65_500]))
def test_documents_come_back(tmp_path_factory, documents, vocab_size):
    folder = tmp_path_factory.mktemp("written")
    documents = [[i % vocab_size for i in document] for document in documents]
    write_megatron(Documents(documents, vocab_size), folder / "a")
    assert read_index(folder / "a") == documents
    config = DataConfig(paths=[f"{folder}/a.idx"], validation_fraction=0.3)
    assert config.reads == "megatron"
    streams = [MegatronStream(config, words(vocab_size), split) for split in ("train", "validation")]
    ids = np.concatenate([stream.read(0, len(stream)) for stream in streams])
    assert ids.tolist() == list(chain(*documents))
    ends = np.concatenate([stream.ends(stream.read(0, len(stream)), 0) for stream in streams])
    assert (np.flatnonzero(ends) + 1).tolist() == np.cumsum([len(document) for document in documents]).tolist()
    assert sum(stream.contents.documents for stream in streams) == len(documents)


def test_documents_of_several_sequences_and_files_stay_together(tmp_path):
    documents = [list(range(i, i + 7)) for i in range(40)]
    write_index(tmp_path / "a", documents[:25], pieces=3)
    write_index(tmp_path / "b", documents[25:], kind="<i4", code=4)
    config = DataConfig(source="megatron", paths=[str(tmp_path)], sequence_length=10, document_mask=True,
                        validation_fraction=0.25)
    train, validation = (open_dataset(config, seed=0, split=split) for split in ("train", "validation"))
    assert train._stream.contents.documents == 30 and len(train._stream) == 210
    batch = validation.batch(range(validation.samples))
    assert batch.unmasked() < batch.targets.numel()
    ends = (batch.tokens[:, :-1] != batch.tokens[:, 1:] - 1)  # ids of a document count up
    assert (batch.documents.diff(dim=1).bool() == ends).all()
    assert find_prefixes((f"{tmp_path}/*",)) == find_prefixes((f"{tmp_path}/a", f"{tmp_path}/b.bin"))


@pytest.mark.parametrize("document_mask", [False, True])
def test_training_reads_the_same_batches_from_what_was_exported(tmp_path, document_mask, capsys):
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_text(f"document {i}\n" * (i % 9 + 1))
    config = DataConfig(paths=[str(tmp_path)], cache=tmp_path / "cache", sequence_length=32, validation_fraction=0.1,
                        document_mask=document_mask)
    words = ["--data.paths", str(tmp_path), "--data.cache", str(config.cache), "--data.validation-fraction", "0.1"]
    assert main(["data", "export", *words, "--out", str(tmp_path / "out")]) == 0
    assert "--data.paths" in capsys.readouterr().out
    exported = config.model_copy(update={"paths": (str(tmp_path / "out-train.idx"),), "validation_fraction": 1e-9})
    batches = [open_dataset(each, seed=1, split="train").batch(range(20)) for each in (config, exported)]
    first, second = batches
    assert (first.tokens == second.tokens).all() and (first.targets == second.targets).all()
    if document_mask:
        assert (first.documents == second.documents).all()
    assert main(["data", "export", *words, "--out", str(tmp_path / "out")]) == 2
    assert "out-train.idx: the file exists" in capsys.readouterr().err
    assert main(["data", "inspect", "--data.paths", str(tmp_path / "out-train.idx")]) == 0
    assert "ids in 1 .bin files" in capsys.readouterr().out


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text\n" * 50)
    config = DataConfig(paths=[str(tmp_path)], cache=tmp_path / "cache")
    stream = open_stream(config, BYTES, "train")
    monkeypatch.setattr(type(stream), "ends", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_megatron(stream, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(UsageError, match="drawn on use"):
        export_megatron(DataConfig(source="synthetic"), tmp_path / "out")


@pytest.mark.parametrize(("damage", "message"), [
    (lambda raw: b"X" + raw[1:], "does not begin with the magic"),
    (lambda raw: raw[:17] + b"\x07" + raw[18:], "7 is no code of an integer type"),
    (lambda raw: raw[:20], "are not files of Megatron"),
    (lambda raw: raw[:-8], "are not files of Megatron"),
    (lambda raw: raw[:18] + struct.pack("<Q", 2**60) + raw[26:], "too few for"),
    (lambda raw: raw[:34] + struct.pack("<i", 3) + raw[38:], "do not follow each other"),
    (lambda raw: raw[:34] + struct.pack("<iiqq", 6, -1, 0, 12) + raw[58:], "do not follow each other"),
    (lambda raw: raw[:-8] + struct.pack("<q", 9), "do not cover its sequences"),
])
def test_a_damaged_index_is_named(tmp_path, damage, message):
    write_index(tmp_path / "a", [[1, 2], [3, 4, 5]])
    index = tmp_path / "a.idx"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(UsageError, match=message):
        MegatronStream(DataConfig(paths=[str(index)]), words(257), "train")


def test_ids_that_do_not_fit_are_named(tmp_path):
    write_index(tmp_path / "a", [[1, 2, 300], [3]])
    with pytest.raises(UsageError, match=r"a\.bin: token id 300 is outside(.|\n)*data\.tokenizer"):
        open_dataset(DataConfig(paths=[str(tmp_path / "a.bin")]), seed=0, split="train")
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(UsageError, match="its 4 ids of 2 bytes are not the 10 bytes"):
        open_dataset(DataConfig(paths=[str(tmp_path / "a.bin")]), seed=0, split="train")
    missing = "no such file of ids"
    for path, message in (("none", missing), ("none.idx", missing), ("s3://bucket/a.idx", "mapped into memory")):
        with pytest.raises(UsageError, match=message):
            find_prefixes((path,))
    with pytest.raises(UsageError, match=r"no such file(.|\n)*Name a file of the pair of Megatron: .*/a\.idx"):
        open_dataset(DataConfig(paths=[str(tmp_path / "a")]), seed=0, split="train")
    with pytest.raises(UsageError, match=r"no such file") as refused:
        open_dataset(DataConfig(paths=[str(tmp_path / "b")]), seed=0, split="train")
    assert "Megatron" not in str(refused.value)


@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_changed_id_in_any_block_that_is_probed_is_seen(place, tmp_path, monkeypatch):
    """The first and the last id are always probed."""
    monkeypatch.setattr(megatron, "_PROBE", 16)

    def fingerprint(value):
        ids = np.arange(1000) % 257
        ids[place] = value
        write_index(tmp_path / "a", [ids[:600].tolist(), ids[600:].tolist()])
        return MegatronStream(DataConfig(paths=[str(tmp_path)]), words(257), "train").contents.fingerprint

    assert fingerprint(7) == fingerprint(7) != fingerprint(8)
    with pytest.raises(UsageError, match="token id 300 is outside"):
        fingerprint(300)


def write_plain(path, documents, header=0):
    """Write ids as nanoGPT's prepare.py does, or with the header of llm.c."""
    ids, kind = list(chain(*documents)), "<u4" if header == 20240801 else "<u2"
    head = np.array([header, 1, len(ids), *[0] * 253] if header else [], "<i4")
    path.write_bytes(head.tobytes() + np.array(ids, kind).tobytes())


@pytest.mark.parametrize("header", [0, 20240520, 20240801])
def test_plain_files_of_nanogpt_and_llm_c_are_read(tmp_path, header):
    documents = [[*range(i, i + 6), 99] for i in range(40)]
    write_plain(tmp_path / "train_0.bin", documents[:30], header)
    write_plain(tmp_path / "train_1.bin", documents[30:], header)
    for path in (f"{tmp_path}/train_*.bin", str(tmp_path)):
        config = DataConfig(source="megatron", paths=[path], validation_fraction=0.25)
        train, validation = (MegatronStream(config, words(100), split) for split in ("train", "validation"))
        assert train.read(0, len(train)).tolist() == list(chain(*documents[:30])) and len(validation) == 70
        ends = np.flatnonzero(train.ends(train.read(0, len(train)), 0)) + 1
        assert ends.tolist() == list(range(7, 211, 7)) and train.contents.documents == 30
    assert DataConfig(paths=[f"{tmp_path}/train_0.bin"]).reads == "megatron"
    with pytest.raises(UsageError, match="token id 99 is outside the vocabulary of 50 ids"):
        MegatronStream(config, words(50), "train")


def test_a_negative_id_is_outside_the_vocabulary():
    reject_unknown_ids(np.array([0, 49]), 50, "a.bin")
    with pytest.raises(UsageError, match=r"a\.bin: token id -1 is outside the vocabulary of 50 ids"):
        reject_unknown_ids(np.array([3, -1, 49]), 50, "a.bin")


def test_a_plain_file_without_ends_is_cut_for_validation(tmp_path):
    write_plain(tmp_path / "train.bin", [[1 + i % 7 for i in range(1000)]])
    config = DataConfig(paths=[f"{tmp_path}/train.bin"], validation_fraction=0.1)
    assert [len(MegatronStream(config, words(9), split)) for split in ("train", "validation")] == [900, 100]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "2 bytes each, and it has 0"), (b"abc", "2 bytes each, and it has 3"),
        (np.arange(9, dtype="<i4").tobytes(), "such a file needs its .idx"),
        (np.array([20240520, 1, 7, *[0] * 253, 5], "<i4").tobytes(), "of 1024 bytes states 7 ids, and it has 1028"),
    ],
)  # fmt: skip
def test_what_is_no_plain_file_is_refused(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        MegatronStream(DataConfig(paths=[f"{tmp_path}/a.bin"]), words(257), "train")
