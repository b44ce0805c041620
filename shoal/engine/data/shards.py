"""Cache of tokenised corpora: checksummed, memory-mapped shards in a folder keyed by content.

A split is one stream of ids, ``document, end, document, end, ...``, cut into raw little-endian files of 16 M ids. The
ids are uint16 if the vocabulary fits, else uint32. ``manifest.json`` beside them lists every file with its length and
checksum. A folder appears in the cache by one rename, so it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from shoal.base.errors import UsageError
from shoal.base.files import expanded, open_to_append, read_bytes, write_atomically
from shoal.base.terminal import printable
from shoal.engine.data.corpus import Corpus, open_corpus
from shoal.engine.data.readers import Skipped
from shoal.engine.data.tokenizer import Tokenizer
from shoal.spec.config import DataConfig

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
IdType = Literal["<u2", "<u4"]  # numpy's names of the types of stored ids
SHARD_TOKENS = 1 << 24

_FORMAT = 1  # part of the key: increment it when the same corpus would give other files
_BATCH_BYTES = 1 << 22  # text per call of the tokenizer: enough for every core, small in memory


class _CacheModel(BaseModel):
    """Base class with exactly these keys and types, since other programs may write to a cache folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardInfo(_CacheModel):
    """One file of a split: its name, length in ids, and xxh3-64 checksum of its bytes."""

    name: Annotated[str, StringConstraints(pattern=r"^(train|validation)-\d{5,}\.bin$")]
    tokens: NonNegativeInt
    checksum: str


class SplitInfo(_CacheModel):
    """One split: its documents, their UTF-8 bytes, ids (with end-of-document ids), and files."""

    documents: NonNegativeInt
    bytes: NonNegativeInt
    tokens: NonNegativeInt
    shards: tuple[ShardInfo, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> SplitInfo:
        if (total := sum(shard.tokens for shard in self.shards)) != self.tokens:
            raise ValueError(f"{self.tokens} ids, but {total} in its shards")
        return self


class SkippedInfo(_CacheModel):
    """Documents that were left out for one reason: how many, and the first one, if its place is known."""

    documents: NonNegativeInt
    first: str = ""


class CacheManifest(_CacheModel):
    """Content of a cache folder. ``skipped`` has the documents that were left out, by reason."""

    corpus: str
    tokenizer: str
    vocab_size: PositiveInt
    dtype: IdType
    splits: dict[Split, SplitInfo]
    skipped: dict[str, SkippedInfo] = {}

    def summary(self) -> list[str]:
        """Return lines that say what was read, and what was left out and why."""
        documents, size = (sum(getattr(info, name) for info in self.splits.values()) for name in ("documents", "bytes"))
        lines = [f"{self.corpus}: {documents:,} documents, {size:,} bytes; skipped {self._count_skipped():,}"]
        for reason, info in sorted(self.skipped.items()):
            lines.append(f"  {info.documents:,} {reason}" + (f"; the first: {info.first}" if info.first else ""))
        return lines

    def _count_skipped(self) -> int:
        return sum(info.documents for info in self.skipped.values())

    @staticmethod
    def read(folder: Path) -> CacheManifest:
        """Parse ``manifest.json``; raises `UsageError` if it is damaged."""
        path = folder / "manifest.json"
        try:
            manifest = CacheManifest.model_validate_json(read_bytes(path))
        except ValidationError as error:
            first = error.errors()[0]
            raise _damaged(path, f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}") from None
        except UsageError as error:
            raise _damaged(path, str(error)) from None
        if missing := [split for split in SPLITS if split not in manifest.splits]:
            raise _damaged(path, f"it has no split '{missing[0]}'")
        return manifest


@dataclass(frozen=True)
class StreamContents:
    """Summary of a stream of token ids: one split of a corpus.

    Attributes:
        fingerprint: key of the content; equal fingerprints hold the same text with the same tokenisation.
        vocab_size: upper bound (exclusive) of all ids.
        bytes: UTF-8 bytes of the text; None if unknown.
        files: number of files.
    """

    corpus: str
    fingerprint: str
    vocab_size: int
    documents: int
    bytes: int | None
    files: int


class Stream(Protocol):
    """One split of a corpus as a stream of token ids.

    Attributes:
        split: its name.
        contents: its summary.
    """

    split: Split

    @property
    def contents(self) -> StreamContents: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids ``start:stop`` of the stream: int64 ``[stop - start]``."""
        ...

    def ends(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Return whether each of the ``ids`` from position ``start`` on is the last one of its document: bool."""
        ...

    def summary(self) -> list[str]:
        """Return lines that say what was read of the corpus, what was left out and why, and where the ids are."""
        ...


class TokenStream:
    """One split as a single memory-mapped stream of ids over its shards.

    The constructor reads every shard once to check its length, checksum and ids.

    Raises:
        UsageError: naming a shard that is missing, damaged or holds an id outside the vocabulary.
    """

    def __init__(self, folder: Path, split: Split, end_of_document: int) -> None:
        self.folder, self.split, self._end = folder, split, end_of_document
        self.manifest = CacheManifest.read(folder)
        self.info = self.manifest.splits[split]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
            self._shards = list(pool.map(self._open, self.info.shards))
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.info.shards])

    def __len__(self) -> int:
        return self.info.tokens

    @property
    def contents(self) -> StreamContents:
        """Summary of the stream."""
        return StreamContents(
            self.manifest.corpus, self.folder.name, self.manifest.vocab_size, self.info.documents, self.info.bytes,
            len(self._shards),
        )

    def ends(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Return whether each of the ``ids`` from position ``start`` on is the last one of its document: bool."""
        return ids == self._end

    def summary(self) -> list[str]:
        """Return lines that say what was read of the corpus, what was left out and why, and where the ids are."""
        return [*self.manifest.summary(), f"{self.manifest.vocab_size:,} token ids, in {self.folder}"]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids ``start:stop`` of the stream: int64 ``[stop - start]``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start}:{stop} of a stream of {len(self)}")
        out = np.empty(stop - start, dtype=np.int64)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            first = int(self._starts[number])
            end = min(stop, int(self._starts[number + 1]))
            out[position - start : end - start] = self._shards[number][position - first : end - first]
            position, number = end, number + 1
        return out

    def _open(self, shard: ShardInfo) -> np.ndarray:
        path = self.folder / shard.name
        try:
            if not shard.tokens:
                raise ValueError("no ids in it")
            if path.is_symlink() or not path.is_file():
                raise ValueError("a link, or no file" if path.exists() else "no such file")
            ids = np.memmap(path, dtype=self.manifest.dtype, mode="r")
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from None
        if len(ids) != shard.tokens:
            raise _damaged(path, f"it has {len(ids)} ids, but {shard.tokens} were written")
        if xxhash.xxh3_64_hexdigest(ids.data) != shard.checksum:
            raise _damaged(path, "its checksum differs from the one in manifest.json")
        _check_ids(ids, self.manifest.vocab_size, str(path))
        return ids


def open_shards(config: DataConfig, tokenizer: Tokenizer, *, progress: bool = False) -> Path:
    """Return the cache folder of this corpus and tokenizer; build it first if it does not exist.

    Safe for any number of concurrent ranks and runs: one builds while the others wait. Where a file system has no
    locks, all build and the first rename wins.

    Raises:
        UsageError: the corpus cannot be read, or the cache folder cannot be written.
    """
    corpus = open_corpus(config)
    cache = expanded(config.cache, "data.cache")
    try:
        content = corpus.fingerprint(cache / "listings")
        recipe = f"{_FORMAT} {content} {tokenizer.fingerprint} {config.validation_fraction} {SHARD_TOKENS}"
        if config.unreadable == "skip":
            recipe += " skip"
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
                _build(folder, corpus, tokenizer, config, progress)
    except OSError as error:
        raise UsageError(
            f"data.cache = '{config.cache}' cannot be used: {error}.\n  Set data.cache to a folder that can be written."
        ) from None
    return folder


def assign_split(content: bytes, validation_fraction: float) -> Split:
    """Return the split of a document by a hash of its UTF-8 bytes, independent of other documents, order and seed."""
    return SPLITS[xxhash.xxh3_64_intdigest(content) < validation_fraction * 2.0**64]


def _build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig, progress: bool) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".staging", dir=folder.parent))
    try:
        dtype: IdType = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        writers = {split: _Writer(staging, split, dtype) for split in SPLITS}
        skipped = Skipped(stop=config.unreadable == "stop")
        with _progress(f"tokenising {corpus.name}", corpus.size, shown=progress) as advance:
            for batch in _batches(corpus.documents(skipped), skipped):
                ids = tokenizer.encode_batch([text for text, _ in batch])
                for (_, content), tokens in zip(batch, ids, strict=True):
                    _check_ids(tokens, tokenizer.vocab_size, f"the tokenizer {tokenizer.fingerprint}")
                    _check_end(content, tokens, tokenizer)
                    split = assign_split(content, config.validation_fraction)
                    writers[split].add(tokens, tokenizer.end_of_document, len(content))
                advance(sum(len(content) for _, content in batch))
        manifest = CacheManifest(
            corpus=corpus.name,
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            splits={split: writer.close() for split, writer in writers.items()},
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
        self._documents = self._bytes = 0
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0

    def add(self, tokens: np.ndarray, end_of_document: int, size: int) -> None:
        """Append a document's ids and the end; ``size`` is its length in UTF-8 bytes."""
        self._pending.append(np.append(tokens.astype(self._dtype), np.array(end_of_document, self._dtype)))
        self._pending_tokens += len(tokens) + 1
        self._documents += 1
        self._bytes += size
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
        return SplitInfo(documents=self._documents, bytes=self._bytes, tokens=tokens, shards=tuple(self._shards))

    def _write(self, ids: np.ndarray) -> None:
        name = f"{self._split}-{len(self._shards):05d}.bin"
        ids.tofile(self._folder / name)
        self._shards.append(ShardInfo(name=name, tokens=len(ids), checksum=xxhash.xxh3_64_hexdigest(ids.data)))


def _batches(documents: Iterator[str], skipped: Skipped) -> Iterator[list[tuple[str, bytes]]]:
    """Group documents, each with its UTF-8 bytes; empty ones are skipped."""
    batch, size = [], 0
    for text in documents:
        if not text:
            skipped.count("empty")
            continue
        content = text.encode()
        batch.append((text, content))
        size += len(content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    if len(ids) and (largest := int(ids.max())) >= vocab_size:
        raise UsageError(f"{where}: token id {largest} is outside the vocabulary of {vocab_size} ids.")


def _check_end(content: bytes, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if (ends := ids == tokenizer.end_of_document).any():
        before = tokenizer.decode(ids[: int(ends.argmax())])[-40:]
        raise UsageError(
            f"a document of {len(content)} bytes that begins with {content[:40].decode(errors='replace')!r} has, after "
            f"{before!r}, text that data.tokenizer encodes as the end of a document (id {tokenizer.end_of_document})."
            "\n  Remove that text from the document, or use a tokenizer whose end token no text encodes to."
        )


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"damaged shard {path}: {why}.\n  Remove the folder {path.parent}; it will be built again.")


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
