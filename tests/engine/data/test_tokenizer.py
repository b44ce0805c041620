import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from shoal.base.errors import UsageError
from shoal.engine.data.tokenizer import BytesTokenizer, FileTokenizer, load_tokenizer, train_bpe

TEXT = ["def main():\n    return 0\n", "the quick brown fox jumps over the lazy dog; the fox\n", "Grüße, 世界 🐟\n"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXT * 20, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@given(text=st.text())
def test_bytes_come_back(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert tokenizer.end_of_document not in ids


@given(texts=st.lists(st.text(), max_size=5))
def test_bpe_comes_back(bpe, texts):
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert bpe.decode(ids) == text
        np.testing.assert_array_equal(ids, bpe.encode(text))
        assert (ids < bpe.vocab_size).all()


def test_bpe_merges(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXT[1])) < len(TEXT[1]) / 2


def test_the_end_of_a_document_cannot_be_written_in_one(bpe):
    text = "before <|endoftext|> after"
    assert bpe.end_of_document not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text)) == text


def test_it_can_be_written_in_a_chat_and_only_there(bpe):
    text = "before <|endoftext|> after"
    for _ in range(2):  # neither changes what the other does
        assert bpe.encode_chat(text).tolist().count(bpe.end_of_document) == 1
        assert bpe.end_of_document not in bpe.encode(text)


def test_a_file_that_cuts_and_pads_texts_does_neither(bpe, tmp_path):
    """Tokenizer files of sentence encoders, such as BERT's, have both settings."""
    file = Tokenizer.from_file(str(bpe.path))
    file.enable_truncation(4)
    file.enable_padding(length=64)
    file.save(str(tmp_path / "tokenizer.json"))
    cut = FileTokenizer(tmp_path / "tokenizer.json")
    for text in ("short", *TEXT):
        assert cut.encode(text).tolist() == cut.encode_batch([text])[0].tolist() == bpe.encode(text).tolist()


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_ends_of_documents_are_not_text(name, bpe):
    tokenizer = bpe if name == "bpe" else BytesTokenizer()
    ids = [*tokenizer.encode("ab"), tokenizer.end_of_document, *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "abc"


def test_bytes_cut_inside_a_letter_and_padded_ids_still_decode():
    assert BytesTokenizer().decode([104, 105, *"é".encode()[:1], 300]) == "hi\ufffd"


def test_equal_files_have_equal_fingerprints(bpe, tmp_path):
    again = train_bpe(TEXT * 20, 300, tmp_path / "again.json")
    other = train_bpe(TEXT * 20, 290, tmp_path / "other.json")
    assert again.fingerprint == bpe.fingerprint != other.fingerprint


def test_training_overwrites_nothing(tmp_path):
    """And says so before it works for minutes."""

    def unread():
        yield pytest.fail("training began")

    out = tmp_path / "tokenizer.json"
    out.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        train_bpe(unread(), 300, out)
    with pytest.raises(UsageError, match=r"at most 16,777,216 ids are trained"):
        train_bpe(unread(), 10**12, tmp_path / "large.json")
    assert out.read_text() == "precious"


def test_a_vocabulary_that_cannot_be_written_is_noticed_first_and_is_written_whole(tmp_path, monkeypatch):
    def unread():
        yield pytest.fail("training began")

    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        train_bpe(unread(), 300, tmp_path / "file" / "tokenizer.json")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        train_bpe(TEXT, 300, tmp_path / "tokenizer.json")
    assert not (tmp_path / "tokenizer.json").exists()


def test_no_text_makes_no_vocabulary(tmp_path):
    with pytest.raises(UsageError, match="has no documents"):
        train_bpe([], 300, tmp_path / "tokenizer.json")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_needs_room_for_bytes(tmp_path):
    with pytest.raises(UsageError, match="at least 257"):
        train_bpe(TEXT, 256, tmp_path / "tokenizer.json")


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"missing\.json"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(UsageError, match=rf"it is a folder.\n  Name the file in it: {tmp_path}/tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(UsageError, match=r"broken\.json' is not a tokenizer"):
        load_tokenizer(str(broken))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    path = tmp_path / "endless.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(UsageError, match="no token that ends a document"):
        FileTokenizer(path)
