"""Files of token ids, read in place as training data: pairs of Megatron-LM, which are also written, and plain ones.

``NAME.bin`` of a pair holds the ids of all sequences, one after another. ``NAME.idx`` (little-endian) describes them:

    magic "MMIDIDX\\0\\0", version 1 (u64), code of the id type (u8), sequences n (u64), documents + 1 (u64)
    lengths [n] i32, byte offsets [n] i64, first sequence of each document and n [documents + 1] i64

This is the format of ``megatron/core/datasets/indexed_dataset.py`` (Megatron-LM, NVIDIA 2019-2025).

A plain ``NAME.bin``, without an index, holds u16 ids alone (karpathy/nanoGPT, ``data/openwebtext/prepare.py``), or 256
i32 before them: a magic number for u16 or u32 ids, a version, and their number (karpathy/llm.c,
``dev/data/data_common.py``; modded-nanogpt). A document in it ends with the tokenizer's end token.
"""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from shoal.base.errors import UsageError
from shoal.base.files import check_writable, expanded, open_to_read, write_atomically
from shoal.engine.data.token_stream import Split, Stream, StreamContents, read_across, reject_unknown_ids
from shoal.engine.data.tokenizer import Tokenizer
from shoal.spec.config import DataConfig

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # codes 6 and 7 are of floats
_HEADERS = {20240520: "<u2", 20240801: "<u4"}  # types of plain ids by the magic number of their header
_HEADER_BYTES = 1024
_SMALL = 65_500  # vocabularies below this are written as uint16, as Megatron does
_PROBES, _PROBE = 64, 1 << 15  # blocks of ids that are read to check and identify a file
_CHUNK = 1 << 24  # ids copied at once
_REMEDY = "\n  Set data.tokenizer to the tokenizer.json that made the file."


@dataclass(frozen=True)
class _TokenFile:
    """A file of ids [tokens], memory-mapped, and the position after the last id of each document."""

    path: Path
    ids: np.ndarray
    ends: np.ndarray
    indexed: bool

    @staticmethod
    def open(prefix: str, end_of_document: int) -> _TokenFile:
        """Open ``prefix.bin``, with its index if there is one."""
        if os.path.isfile(f"{prefix}.idx"):
            return _TokenFile.open_indexed(prefix)
        return _TokenFile.open_plain(Path(f"{prefix}.bin"), end_of_document)

    @staticmethod
    def open_plain(path: Path, end_of_document: int) -> _TokenFile:
        """Map a file without an index; raises `UsageError` if it holds no ids of a known type."""
        try:
            with open_to_read(path) as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(12)
            magic, _, count = struct.unpack("<3i", head.ljust(12))
            skipped, kind = (_HEADER_BYTES, _HEADERS[magic]) if magic in _HEADERS else (0, "<u2")
            tokens, odd = divmod(size - skipped, np.dtype(kind).itemsize)
            if odd or tokens < 1 or (skipped and tokens != count):
                wanted = f"its header of {skipped} bytes states {count} ids" if skipped else "ids have 2 bytes each"
                raise ValueError(f"{wanted}, and it has {size} bytes")
            ids = np.memmap(path, kind, mode="r", offset=skipped)
            if not skipped and tokens > 1 and not ids[1:_PROBE:2].any():
                raise ValueError("every second number in it is 0, as in ids of 4 bytes; such a file needs its .idx")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} has no .idx beside it, and is no plain file of ids either: {error}.") from None
        parts = (start + 1 + np.flatnonzero(ids[start : start + _CHUNK] == end_of_document)
                 for start in range(0, tokens, _CHUNK))  # fmt: skip
        ends = np.concatenate([*parts])
        return _TokenFile(path, ids, ends if len(ends) and ends[-1] == tokens else np.append(ends, tokens), False)

    @staticmethod
    def open_indexed(prefix: str) -> _TokenFile:
        """Map ``prefix.bin`` and read ``prefix.idx``; raises `UsageError` if they do not fit together."""
        index, content = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        try:
            with open_to_read(index) as file:
                raw = file.read()
            with open_to_read(content) as file:
                size = os.fstat(file.fileno()).st_size
            magic, version, code, sequences, documents = _HEADER.unpack_from(raw)
            if (magic, version) != (_MAGIC, 1):
                raise ValueError("it does not begin with the magic number and version 1")
            if code not in _TYPES:
                raise ValueError(f"{code} is no code of an integer type ({', '.join(map(str, _TYPES))})")
            if sequences > len(raw) or documents > len(raw):
                raise ValueError(f"{len(raw)} bytes are too few for {sequences} sequences and {documents} documents")
            at, arrays = _HEADER.size, []
            for kind, count in (("<i4", sequences), ("<i8", sequences), ("<i8", documents)):
                arrays.append(np.frombuffer(raw, kind, count, at))
                at += arrays[-1].nbytes
            lengths, offsets, firsts = arrays
            width, after = np.dtype(_TYPES[code]).itemsize, np.cumsum(lengths, dtype=np.int64)
            tokens = int(after[-1]) if sequences else 0
            if (lengths < 0).any() or not np.array_equal(offsets, (after - lengths) * width):
                raise ValueError("its sequences do not follow each other in the .bin file")
            if not documents or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
                raise ValueError("its documents do not cover its sequences")
            if tokens * width != size:
                raise ValueError(f"its {tokens} ids of {width} bytes are not the {size} bytes of {content}")
            ids = np.memmap(content, _TYPES[code], mode="r") if tokens else np.empty(0, _TYPES[code])
        except (OSError, ValueError, struct.error) as error:
            raise UsageError(f"{index} and {content.name} are not files of Megatron: {error}.") from None
        ends = np.concatenate(([0], after))[firsts[1:]]
        return _TokenFile(content, ids, ends[np.diff(ends, prepend=0) > 0], True)

    def probe(self, vocab_size: int) -> str:
        """Return a hash of the documents' lengths and of evenly spaced blocks of ids, which are checked."""
        content = xxhash.xxh3_128(self.ends.tobytes())
        for start in np.unique(np.linspace(0, max(0, len(self.ids) - _PROBE), _PROBES, dtype=np.int64)).tolist():
            block = self.ids[start : start + _PROBE]
            reject_unknown_ids(block, vocab_size, str(self.path), _REMEDY)
            content.update(block.tobytes())
        return content.hexdigest()


class MegatronStream:
    """One split of files of ids, read in place; documents with the text of several sequences stay together.

    The last documents, `data.validation_fraction` of all ids, are the validation split. A document of a plain file that
    would leave less than half of it is cut.

    Raises:
        UsageError: a file is missing or damaged, or an id is outside the tokenizer's vocabulary. Blocks of each file
            are checked when it is opened, other ids when they are read.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: Split) -> None:
        vocab_size, end = tokenizer.vocab_size, tokenizer.end_of_document
        files = [_TokenFile.open(prefix, end) for prefix in find_prefixes(config.paths)]
        self.split, self._files, self._vocab = split, files, vocab_size
        self._starts = np.cumsum([0] + [len(file.ids) for file in files])
        ends = np.concatenate([file.ends + start for file, start in zip(files, self._starts[:-1], strict=True)])
        total = int(self._starts[-1])
        wanted = (1 - config.validation_fraction) * total
        cut = int(np.searchsorted(ends, wanted))
        boundary = int(ends[cut]) if cut < len(ends) else total
        if total - boundary < (total - wanted) / 2 and not all(file.indexed for file in files):
            boundary = int(wanted)
        self._first, last = (0, boundary) if split == "train" else (boundary, total)
        self._length = last - self._first
        self._ends = ends[(ends > self._first) & (ends <= last)] - self._first
        content = xxhash.xxh3_128(f"megatron {tokenizer.fingerprint} {config.validation_fraction}".encode())
        for file in files:
            content.update(file.probe(vocab_size).encode())
        name = ", ".join(config.paths)
        self.contents = StreamContents(
            name, content.hexdigest(), vocab_size, len(self._ends), None, len(files)
        )

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"ids {start}:{stop} of a stream of {self._length}")

        def read(number: int, first: int, last: int) -> np.ndarray:
            file = self._files[number]
            reject_unknown_ids(ids := file.ids[first:last], self._vocab, str(file.path), _REMEDY)
            return ids

        return read_across(self._starts, start + self._first, stop + self._first, read)

    def ends(self, ids: np.ndarray, start: int) -> np.ndarray:
        first, last = np.searchsorted(self._ends, (start, start + len(ids)), side="right")
        found = np.zeros(len(ids), dtype=bool)
        found[self._ends[first:last] - 1 - start] = True
        return found

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        return None

    def summary(self) -> list[str]:
        ids = int(self._starts[-1])
        return [f"{self.contents.corpus}: {ids:,} ids in {len(self._files)} .bin files", f"{self._vocab:,} token ids"]


def find_prefixes(paths: tuple[str, ...]) -> list[str]:
    """Return the paths of files of ids, without suffix: each given so, by one of a pair, by a folder or a glob.

    A folder or a glob that has pairs has no plain files.

    Raises:
        UsageError: a path matches no file.
    """
    found: dict[str, None] = {}
    for given in paths:
        if "://" in given.removeprefix("file://"):
            raise UsageError(f"data.paths: '{given}': these files are mapped into memory.\n  Copy them to a disk.")
        path = str(expanded(given.removeprefix("file://"), "data.paths"))
        stem = f"{path}/**/*" if os.path.isdir(path) else path.removesuffix(".idx").removesuffix(".bin")
        for suffix in (".idx",) if path.endswith(".idx") else (".idx", ".bin"):
            pattern = f"{stem}{suffix}"
            if matches := [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True)):
                found |= dict.fromkeys(match.removesuffix(suffix) for match in matches)
                break
        else:
            raise UsageError(f"data.paths: '{given}': no such file of ids, .bin and .idx (relative to {Path.cwd()}).")
    return list(found)


def write_megatron(stream: Stream, out: Path) -> None:
    """Write a stream as ``out.bin`` and ``out.idx``, one sequence for each document; the index appears last.

    Raises:
        UsageError: a file exists already or cannot be written, or a document has 2^31 ids or more.
    """
    index, content = (out.with_name(f"{out.name}{suffix}") for suffix in (".idx", ".bin"))
    for path in (index, content):
        check_writable(path, "--out", new=True)
    kind = np.uint16 if stream.contents.vocab_size < _SMALL else np.int32
    ends = np.concatenate([np.empty(0, np.int64), *_copy(stream, content, kind)])
    if not len(ends) or ends[-1] < len(stream):  # ids after the last end are a document too
        ends = np.append(ends, len(stream)) if len(stream) else ends
    lengths = np.diff(ends, prepend=0)
    if len(lengths) and lengths.max() >= 2**31:
        raise UsageError(f"--out {out}: a document has {lengths.max()} ids, and Megatron's index holds less than 2^31.")
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == kind)
    header = _HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1)
    offsets = (ends - lengths) * np.dtype(kind).itemsize
    parts = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    _write(index, [header, *(part.tobytes() for part in parts)])


def _copy(stream: Stream, path: Path, kind: type[np.generic]) -> list[np.ndarray]:
    ends = []

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(stream), _CHUNK):
            ids = stream.read(start, min(start + _CHUNK, len(stream)))
            ends.append(start + 1 + np.flatnonzero(stream.ends(ids, start)))
            yield ids.astype(np.dtype(kind).newbyteorder("<")).tobytes()

    _write(path, chunks())
    return ends


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    try:
        write_atomically(path, chunks, new=True)
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}.") from None
