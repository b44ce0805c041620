"""Tokenised corpora in the cache: checksummed, memory-mapped shards in a folder keyed by content.

A split is one stream of ids, ``document, end, document, end, ...``, cut into raw little-endian files of 16 M ids. The
ids are uint16 if the vocabulary fits, else uint32. ``manifest.json`` beside them lists every file with its length and
checksum. In conversations the highest bits of an id mark what counts in the loss, and ends of documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from shoal.base.files import read_bytes

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
IdType = Literal["<u2", "<u4"]  # numpy's names of the types of stored ids
COUNTS, ENDS = 1 << 31, 1 << 30  # bits of a stored id: it counts in the loss, and it ends a document
IDS = ENDS - 1


class _CacheModel(BaseModel):
    """Base class with exactly these keys and types, since other programs may write to a cache folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardInfo(_CacheModel):
    """One file of a split: its name, length in ids, and xxh3-64 checksum of its bytes."""

    name: Annotated[str, StringConstraints(pattern=r"^(train|validation)-\d{5,}\.bin$")]
    tokens: NonNegativeInt
    checksum: str


class SplitInfo(_CacheModel):
    """One split: its documents, their UTF-8 bytes (0 if unknown), ids (with end-of-document ids), and files."""

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
    """Content of a cache folder. ``skipped`` has the documents that were left out, by reason.

    ``marked`` says whether the ids carry the bits `COUNTS` and `ENDS`.
    """

    corpus: str
    tokenizer: str
    vocab_size: PositiveInt
    dtype: IdType
    splits: dict[Split, SplitInfo]
    skipped: dict[str, SkippedInfo] = {}
    marked: bool = False

    def summary(self) -> list[str]:
        """Return lines that say what was read, and what was left out and why."""
        documents, size = (sum(getattr(info, name) for info in self.splits.values()) for name in ("documents", "bytes"))
        skipped = sum(info.documents for info in self.skipped.values())
        content = f", {size:,} bytes" if size or not documents else " of token ids"
        lines = [f"{self.corpus}: {documents:,} document{'s' * (documents != 1)}{content}; skipped {skipped:,}"]
        for reason, info in sorted(self.skipped.items()):
            lines.append(f"  {info.documents:,} {reason}" + (f"; the first: {info.first}" if info.first else ""))
        return lines

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
        left_out: lines that say how many documents of the corpus were left out, and why.
    """

    corpus: str
    fingerprint: str
    vocab_size: int
    documents: int
    bytes: int | None
    files: int
    left_out: tuple[str, ...] = ()


class Stream(Protocol):
    """One split of a corpus as a stream of token ids."""

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

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether each of the ids ``start:stop`` counts in the loss, bool; None if all do."""
        ...

    def summary(self) -> list[str]:
        """Return lines that say what was read of the corpus, what was left out and why, and where the ids are."""
        ...


class TokenStream:
    """One split as a single memory-mapped stream of ids over its shards.

    The constructor reads every shard once to check its length, checksum and ids.

    Args:
        name: name of the corpus (default: the one with which the shards were made, maybe of another copy of it).

    Raises:
        UsageError: naming a shard that is missing, damaged or holds an id outside the vocabulary.
    """

    def __init__(self, folder: Path, split: Split, end_of_document: int, name: str = "") -> None:
        self.folder, self.split, self._end = folder, split, end_of_document
        manifest = CacheManifest.read(folder)
        self.manifest = manifest.model_copy(update={"corpus": name or manifest.corpus})
        self.info = self.manifest.splits[split]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
            self._shards = list(pool.map(self._open, self.info.shards))
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.info.shards])

    def __len__(self) -> int:
        return self.info.tokens

    @property
    def contents(self) -> StreamContents:
        return StreamContents(
            self.manifest.corpus, self.folder.name, self.manifest.vocab_size, self.info.documents,
            self.info.bytes or None, len(self._shards), tuple(self.manifest.summary()[1:]),
        )

    def ends(self, ids: np.ndarray, start: int) -> np.ndarray:
        return (self._read(start, start + len(ids)) & ENDS) > 0 if self.manifest.marked else ids == self._end

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        return (self._read(start, stop) & COUNTS) > 0 if self.manifest.marked else None

    def summary(self) -> list[str]:
        return [*self.manifest.summary(), f"{self.manifest.vocab_size:,} token ids, in {self.folder}"]

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._read(start, stop) & IDS

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Return ids with their marks."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start}:{stop} of a stream of {len(self)}")
        return read_across(self._starts, start, stop, lambda number, first, last: self._shards[number][first:last])

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
        reject_unknown_ids(ids & IDS if self.manifest.marked else ids, self.manifest.vocab_size, str(path))
        return ids


def read_across(
    starts: np.ndarray, start: int, stop: int, read: Callable[[int, int, int], np.ndarray]
) -> np.ndarray:
    """Return ids ``start:stop`` of files that follow each other: int64 ``[stop - start]``.

    Args:
        starts: position of the first id of each file, and after them the number of all ids.
        read: returns the ids of a file, by its number, from one position in it to another.
    """
    out = np.empty(stop - start, dtype=np.int64)
    number = int(np.searchsorted(starts, start, side="right")) - 1
    position = start
    while position < stop:
        first, end = int(starts[number]), min(stop, int(starts[number + 1]))
        out[position - start : end - start] = read(number, position - first, end - first)
        position, number = end, number + 1
    return out


def reject_unknown_ids(ids: np.ndarray, vocab_size: int, where: str, remedy: str = "") -> None:
    """Reject ids outside the vocabulary."""
    for wrong in (int(ids.max()), int(ids.min())) if len(ids) else ():
        if not 0 <= wrong < vocab_size:
            raise UsageError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size} ids.{remedy}")


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"damaged shard {path}: {why}.\n  Remove the folder {path.parent}; it will be built again.")
