"""Build the cache of tokenised corpora; a folder appears by one rename, so it is either complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from shoal.base.errors import UsageError
from shoal.base.files import expanded, open_to_append, write_atomically
from shoal.base.terminal import printable
from shoal.engine.data.chat import ConversationEncoder
from shoal.engine.data.corpus import Corpus, open_corpus
from shoal.engine.data.readers import Document, Skipped
from shoal.engine.data.token_stream import (
    COUNTS,
    ENDS,
    SPLITS,
    CacheManifest,
    IdType,
    ShardInfo,
    SkippedInfo,
    Split,
    SplitInfo,
    reject_unknown_ids,
)
from shoal.engine.data.tokenizer import Tokenizer
from shoal.spec.config import DataConfig

SHARD_TOKENS = 1 << 24

_FORMAT = 2  # part of the key: increment it when the same corpus would give other files
_BATCH_BYTES = 1 << 22  # text per call of the tokenizer: enough for every core, small in memory


def open_shards(config: DataConfig, tokenizer: Tokenizer, *, progress: bool = False) -> Path:
    """Return the cache folder of this corpus and tokenizer; build it first if it does not exist.

    Safe for any number of concurrent ranks and runs: one builds while the others wait. Where a file system has no
    locks, all build and the first rename wins.

    Raises:
        UsageError: the corpus cannot be read, or the cache folder cannot be written.
    """
    corpus, encoder = open_corpus(config), ConversationEncoder(tokenizer) if config.chat else None
    cache = expanded(config.cache, "data.cache")
    try:
        content = corpus.fingerprint(cache / "listings")
        recipe = f"{_FORMAT} {content} {tokenizer.fingerprint} {config.validation_fraction} {SHARD_TOKENS}"
        if config.unreadable == "skip":
            recipe += " skip"
        if encoder:
            recipe += f" chat {encoder.fingerprint} {config.sequence_length}"
        key = xxhash.xxh3_128_hexdigest(recipe.encode())
        folder = cache / "shards" / key
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")) as alone:
            if alone:  # any staging folder of this key is from a build that was killed
                for left in folder.parent.glob(f"{key}.*.staging"):
                    shutil.rmtree(left, ignore_errors=True)
            if not folder.is_dir():
                _build(folder, corpus, tokenizer, config, progress, encoder)
    except OSError as error:
        raise UsageError(
            f"data.cache = '{config.cache}' cannot be used: {error}.\n  Set data.cache to a folder that can be written."
        ) from None
    return folder


def assign_split(content: bytes, validation_fraction: float) -> Split:
    """Return the split of a document by a hash of its UTF-8 bytes, independent of other documents, order and seed."""
    return SPLITS[xxhash.xxh3_64_intdigest(content) < validation_fraction * 2.0**64]


def _build(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig, progress: bool,
    encoder: ConversationEncoder | None,
) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".staging", dir=folder.parent))
    try:
        dtype: IdType = "<u2" if tokenizer.vocab_size <= 1 << 16 and not encoder else "<u4"
        writers = {split: _Writer(staging, split, dtype) for split in SPLITS}
        skipped = Skipped(config.unreadable == "stop", config.chat)
        with _progress(f"tokenising {corpus.name}", corpus.size, shown=progress) as advance:
            batches = batch_documents(corpus.documents(skipped), skipped)
            for batch in assign_documents(batches, config.validation_fraction, divide=encoder is None):
                contents = [content for _, content, _ in batch]
                split = [writers[name] for *_, name in batch]
                if encoder:
                    for (text, content, _), writer in zip(batch, split, strict=True):
                        assert isinstance(text, str), "conversations are read as text"
                        _add_conversation(writer, encoder, text, len(content), tokenizer, config, skipped)
                else:
                    encoded = iter(tokenizer.encode_batch([text for text, *_ in batch if isinstance(text, str)]))
                    for (document, content, _), writer in zip(batch, split, strict=True):
                        if not isinstance(document, str):
                            _add_ids(writer, document, tokenizer)
                            continue
                        tokens = next(encoded)
                        reject_unknown_ids(tokens, tokenizer.vocab_size, f"the tokenizer {tokenizer.fingerprint}")
                        _check_end(content, tokens, tokenizer)
                        writer.add(np.append(tokens, np.uint32(tokenizer.end_of_document)), len(content))
                advance(sum(map(len, contents)))
            for writer in writers.values() if encoder else ():  # complete the last sequence, and the target of its end
                left = -writer.tokens % config.sequence_length
                if writer.tokens:
                    writer.append(np.full(left + 1, tokenizer.end_of_document | ENDS, dtype=np.uint32))
        manifest = CacheManifest(
            corpus=corpus.name,
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            splits={split: writer.close() for split, writer in writers.items()},
            marked=encoder is not None,
            skipped={
                reason: SkippedInfo(documents=count, first=skipped.first.get(reason, ""))
                for reason, count in skipped.counts.items()
            },
        )
        if progress:
            print("\n".join(map(printable, manifest.summary())), file=sys.stderr, flush=True)
        write_atomically(staging / "manifest.json", manifest.model_dump_json(indent=1))
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another build of the same content was first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Writer:
    """Writer of one split's stream, which starts a new shard when one is full."""

    def __init__(self, folder: Path, split: Split, dtype: IdType) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shards: list[ShardInfo] = []
        self._documents = self._bytes = self.tokens = 0
        self._text = True
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0

    def add(self, tokens: np.ndarray, size: int | None) -> None:
        """Append a document's ids, with the end; ``size`` is its length in UTF-8 bytes, None if it has no text."""
        self._documents += 1
        self._bytes += size or 0
        self._text &= size is not None
        self.append(tokens)

    def append(self, tokens: np.ndarray) -> None:
        self.tokens += len(tokens)
        self._pending.append(tokens.astype(self._dtype))
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= SHARD_TOKENS:
            stream = np.concatenate(self._pending)
            complete = len(stream) // SHARD_TOKENS * SHARD_TOKENS
            for start in range(0, complete, SHARD_TOKENS):
                self._write(stream[start : start + SHARD_TOKENS])
            self._pending, self._pending_tokens = [stream[complete:]], len(stream) - complete

    def close(self) -> SplitInfo:
        """Write the remaining ids and return a summary."""
        if self._pending_tokens:
            self._write(np.concatenate(self._pending))
        tokens = sum(shard.tokens for shard in self._shards)
        size = self._bytes if self._text else 0
        return SplitInfo(documents=self._documents, bytes=size, tokens=tokens, shards=tuple(self._shards))

    def _write(self, ids: np.ndarray) -> None:
        name = f"{self._split}-{len(self._shards):05d}.bin"
        ids.tofile(self._folder / name)
        self._shards.append(ShardInfo(name=name, tokens=len(ids), checksum=xxhash.xxh3_64_hexdigest(ids.data)))


def _add_ids(writer: _Writer, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Append a document of token ids, which may have its end, and ends of other documents in it."""
    end = np.uint32(tokenizer.end_of_document)
    if (largest := ids.max()) >= tokenizer.vocab_size:
        raise UsageError(
            f"a document of {len(ids)} token ids that begins with {ids[:8].tolist()} has the id {largest}, but "
            f"data.tokenizer has {tokenizer.vocab_size} ids.\n  Set data.tokenizer to the one that made the ids."
        )
    writer.add(ids if ids[-1] == end else np.append(ids, end), None)


def _add_conversation(
    writer: _Writer, encoder: ConversationEncoder, text: str, size: int, tokenizer: Tokenizer, config: DataConfig,
    skipped: Skipped,
) -> None:
    """Append a conversation within one sequence; a sequence without space for it is filled with ends of documents.

    The stream of a split has s ids for each sequence, and the first of the next: the target of the last one.
    """
    try:
        documents = encoder.encode(json.loads(text))
    except UsageError as error:
        skipped.unreadable("refused by the chat template", f"{error} The conversation begins with {text[:80]!r}.")
        return
    for ids, counts in documents:
        if len(ids) > config.sequence_length:
            skipped.count("longer than data.sequence_length", f"{len(ids)} tokens, beginning with {text[:80]!r}")
            continue
        if not counts.any():
            skipped.count("without a message of the assistant", f"beginning with {text[:80]!r}")
            continue
        reject_unknown_ids(ids, tokenizer.vocab_size, f"the tokenizer {tokenizer.fingerprint}")
        left = -writer.tokens % config.sequence_length
        if len(ids) > left:
            writer.append(np.full(left, tokenizer.end_of_document | ENDS, dtype=np.uint32))
        marked = ids.astype(np.uint32) | (counts * np.uint32(COUNTS))
        marked[-1] |= ENDS
        writer.add(marked, size)
        size = 0  # each conversation counts once


def batch_documents(documents: Iterator[Document], skipped: Skipped) -> Iterator[list[tuple[Document, bytes]]]:
    """Group documents, each with its bytes: UTF-8, or its token ids; empty ones are skipped."""
    batch, size = [], 0
    for document in documents:
        if not len(document):
            skipped.count("empty")
            continue
        content = _as_bytes(document)
        batch.append((document, content))
        size += len(content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _as_bytes(document: Document) -> bytes:
    return document.encode() if isinstance(document, str) else document.astype("<u4").tobytes()


def assign_documents(
    batches: Iterator[list[tuple[Document, bytes]]], fraction: float, *, divide: bool
) -> Iterator[list[tuple[Document, bytes, Split]]]:
    """Add the split of each document.

    If all have the same, as a book in one file has, and ``divide`` allows it, the end of the text is held out instead:
    the last documents, and at most half of the one before them, cut at a line end if it has one there.
    """
    batch: list[tuple[Document, bytes, Split]] = []
    found: set[Split] = set()
    size = 0
    for documents in batches:
        if batch:
            yield batch
        batch = [(document, content, assign_split(content, fraction)) for document, content in documents]
        found |= {split for *_, split in batch}
        size += sum(len(content) for _, content in documents)
    if divide and len(found) == 1 and fraction < 1 and (wanted := int(fraction * size)):
        out, first = 0, len(batch) - 1
        while first and out + len(batch[first][1]) <= wanted:
            out += len(batch[first][1])
            first -= 1
        last, unit = batch[first][0], 1 if isinstance(batch[first][0], str) else 4  # bytes of an id
        cut = len(last) - min(len(last) // 2, (wanted - out) // unit)
        cut = last.rfind("\n", len(last) // 2, cut) + 1 or cut if isinstance(last, str) else cut
        parts: list[tuple[Document, Split]] = [(last[:cut], "train"), (last[cut:], "validation")]
        parts += [(document, "validation") for document, *_ in batch[first + 1 :]]
        batch = batch[:first] + [(part, _as_bytes(part), split) for part, split in parts if len(part)]
    if batch:
        yield batch


def _check_end(content: bytes, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if (ends := ids == tokenizer.end_of_document).any():
        before = tokenizer.decode(ids[: int(ends.argmax())])[-40:]
        raise UsageError(
            f"a document of {len(content)} bytes that begins with {content[:40].decode(errors='replace')!r} has, after "
            f"{before!r}, text that data.tokenizer encodes as the end of a document (id {tokenizer.end_of_document})."
            "\n  Remove that text from the document, or use a tokenizer whose end token no text encodes to."
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file lock, which the system releases when the process dies; yields False if locks are unsupported."""
    with open_to_append(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _progress(title: str, total: int | None, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, or one plain line elsewhere, if ``shown``; yields a function to advance it."""
    if not shown:
        yield lambda size: None
    elif not sys.stderr.isatty():
        print(title, file=sys.stderr, flush=True)
        yield lambda size: None
    else:
        from rich import progress as bar
        from rich.console import Console

        columns = (bar.BarColumn(), bar.DownloadColumn(), bar.TimeRemainingColumn())
        with bar.Progress("{task.description}", *columns, console=Console(stderr=True)) as display:
            task = display.add_task(title, total=total)
            yield lambda size: display.advance(task, size)
