"""Tokenizers: text to token ids and back, with bytes or any Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import xxhash

from shoal.base.errors import UsageError
from shoal.base.files import expanded, read_bytes, try_to_write, write_atomically
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig

END_OF_DOCUMENT = "<|endoftext|>"

# Names of the end-of-document token in published tokenizers, the most common first.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")


class BytesTokenizer:
    """Tokenizer of the 256 bytes of UTF-8 and an end-of-document id; encodes any text without training or a file.

    Attributes:
        vocab_size: upper bound (exclusive) of all ids.
        end_of_document: the id that ends a document; a corpus with text that encodes to it is rejected.
        fingerprint: part of the key of cached shards; tokenizers with equal fingerprints encode equally.
    """

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes"

    def encode(self, text: str, *, begin: bool = False) -> np.ndarray:
        """Encode one text: ``[bytes]``, uint8. No id begins a text, so ``begin`` changes nothing."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and the character of it in which each begins: ``[bytes]`` both."""
        sizes = [len(letter.encode()) for letter in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts, on one core: each is only a copy of memory."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ``ids`` except document ends; bytes that are not UTF-8 (a text may end inside a character) become
        U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class FileTokenizer:
    """Tokenizer from the ``tokenizer.json`` at ``path``, run by Hugging Face ``tokenizers``; see `BytesTokenizer`.

    Raises:
        UsageError: the file is missing, is not a tokenizer, or has no token that ends a document.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            content = read_bytes(path)
        except UsageError as error:
            inside = path / "tokenizer.json"
            mend = (f"Name the file in it: {inside}" if inside.is_file() else
                    "Use 'bytes', make the file with shoal data train-tokenizer, or take it from the Hugging Face hub "
                    "with hf download OWNER/NAME tokenizer.json")
            raise UsageError(
                f"data.tokenizer = '{path}' is neither 'bytes' nor a readable file: {error}\n  {mend}"
            ) from None
        self.path = path
        with self._reject_errors():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # The characters "<|endoftext|>" inside a document are text, and must not end it.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_document = self._find_end(path)
        self.end_name = self._tokenizer.id_to_token(self.end_of_document)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint = xxhash.xxh3_128_hexdigest(content)

    @contextmanager
    def _reject_errors(self) -> Iterator[None]:
        """Reject a file with an error that the library may only find on use.

        Its Rust code raises nothing more specific than Exception, and panics as a BaseException of its own.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UsageError(f"data.tokenizer = '{self.path}' is not a tokenizer.json: {error}") from None

    def _find_end(self, path: Path) -> int:
        for name in _END_NAMES:
            if (token := self._tokenizer.token_to_id(name)) is not None:
                return token
        specials = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
        raise UsageError(
            f"data.tokenizer = '{path}' has no token that ends a document; its special tokens: "
            f"{', '.join(specials) or 'none'}.\n  Add one of: {', '.join(_END_NAMES)}."
        )

    def encode(self, text: str, *, begin: bool = False) -> np.ndarray:
        """Encode ``text``: ``[tokens]``, uint32. ``begin`` adds the ids that the file puts around a text."""
        with self._reject_errors():
            return np.array(self._tokenizer.encode(text, add_special_tokens=begin).ids, dtype=np.uint32)

    def encode_chat(self, text: str) -> np.ndarray:
        """Encode the output of a chat template, in which the names of special tokens stand for the tokens."""
        return self.encode_with_starts(text)[0]

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return `encode_chat`'s ids of a text, and the character of it in which each begins: ``[tokens]`` both."""
        self._tokenizer.encode_special_tokens = False
        try:
            with self._reject_errors():
                found = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        starts = np.array([start for start, _ in found.offsets], dtype=np.int64)
        return np.array(found.ids, dtype=np.uint32), starts

    def find(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts on all cores, with the library's own threads, so that nothing is forked or pickled."""
        with self._reject_errors():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ``ids``; special tokens, and ids without a token (of a padded vocabulary), are skipped."""
        with self._reject_errors():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


Tokenizer = BytesTokenizer | FileTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer for ``data.tokenizer``: ``bytes``, or the path of a ``tokenizer.json``.

    Raises:
        UsageError: see `FileTokenizer`.
    """
    return BytesTokenizer() if name == "bytes" else FileTokenizer(expanded(name, "data.tokenizer"))


def has_other_tokenizer(folder: Path, name: str) -> bool:
    """Return whether the tokenizer in a model folder is another than the one that ``data.tokenizer`` names."""
    theirs = folder / "tokenizer.json"
    return theirs.is_file() and (name == "bytes" or read_bytes(theirs) != read_bytes(expanded(name, "data.tokenizer")))


def build_shape(config: RunConfig) -> ModelShape:
    """Return the shape of a run's model, which has the vocabulary of the run's tokenizer."""
    vocab = load_tokenizer(config.data.tokenizer).vocab_size
    return config.model.shape(vocab=vocab, sequence_length=config.data.sequence_length)


MOST_IDS = 2**24  # of a trained tokenizer


def train_bpe(documents: Iterable[str], vocab_size: int, out: Path) -> FileTokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; over bytes: Radford et al. 2019) and save it.

    Args:
        vocab_size: number of bytes (256), the end-of-document token and merges together; a small corpus may give
            fewer.
        out: path of the ``tokenizer.json``; an existing file is never overwritten.

    Raises:
        UsageError: ``out`` exists or cannot be written, ``vocab_size`` is too small for the bytes and the end token,
            or the corpus has no text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    smallest = BytesTokenizer.vocab_size
    if vocab_size < smallest:
        raise UsageError(f"vocabulary of {vocab_size}: byte-level BPE needs at least {smallest}, bytes and end token.")
    if vocab_size > MOST_IDS:  # the trainer would allocate them at once
        raise UsageError(f"vocabulary of {vocab_size}: at most {MOST_IDS:,} ids are trained.")
    try:
        try_to_write(out.parent)  # before reading all text
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}.") from None
    if os.path.lexists(out):
        raise UsageError(f"{out} exists, and runs may depend on it.\n  Choose another name, or remove it first.")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = iter(documents)
    if (first := next(documents, None)) is None:
        raise UsageError("cannot train a tokenizer: the corpus has no documents.\n  Give more text.")
    tokenizer.train_from_iterator(chain((first,), documents), trainer)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, tokenizer.to_str(pretty=True), new=True)  # another process may have created it meanwhile
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}.") from None
    return FileTokenizer(out)
