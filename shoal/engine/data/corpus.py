"""Sources of documents: the standard library, text files, JSONL, parquet, or a Hugging Face dataset."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import expanded, open_to_read, read_bytes, read_text, write_atomically
from shoal.spec.config import DataConfig

if TYPE_CHECKING:
    import datasets

# A longer text file is cut at line ends into documents of about this many characters, to bound memory.
LONGEST_TEXT = 1 << 20

# Excluded from the stdlib corpus: installed packages, and tests, which some systems package separately (without
# them the corpus is nearly the same 13 MB on every system).
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


_READERS = {
    "paths": ("text", "jsonl", "parquet"), "field": ("jsonl", "parquet", "hub"), "dataset": ("hub",),
}


@dataclass(frozen=True)
class FileCorpus:
    """A fixed sequence of documents, from files in order.

    Attributes:
        files: the files, in the order they are read.
        reader: the reader and its options, as part of the fingerprint.
        plain: whether each file is plain text.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[str]]
    reader: str
    plain: bool = False

    @property
    def size(self) -> int | None:
        """UTF-8 bytes of all documents; None if unknown before reading."""
        return sum(path.stat().st_size for path in self.files) if self.plain else None

    def documents(self) -> Iterator[str]:
        """Yield all documents, in the same order each time.

        Raises:
            UsageError: a document cannot be read, naming the file and where possible the line.
        """
        for path in self.files:
            try:
                yield from self.read(path)
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror or error}.") from None

    def fingerprint(self, memo: Path) -> str:
        """Return a hash of the files' contents, independent of their names; equal hashes mean equal documents.

        Args:
            memo: folder that caches the hash by paths, sizes and modification times, so that files are read once.
        """
        reader = self.reader.encode()
        listing = xxhash.xxh3_128(reader)
        for path in self.files:
            stat = path.stat()
            listing.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        remembered = memo / listing.hexdigest()
        with suppress(UsageError):  # missing, or not readable
            if re.fullmatch(r"[0-9a-f]{32}", known := read_text(remembered)):
                return known
        content = xxhash.xxh3_128(reader)
        for path in self.files:
            try:
                with open_to_read(path) as file:
                    content.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}.") from None
        memo.mkdir(parents=True, exist_ok=True)
        write_atomically(remembered, content.hexdigest())
        return content.hexdigest()


@dataclass(frozen=True)
class HubCorpus:
    """The ``train`` split of a Hugging Face dataset: ``owner/name``, ``owner/name:configuration`` or a folder."""

    name: str
    field: str
    size: None = None

    @cached_property
    def _rows(self) -> datasets.Dataset:
        try:
            import datasets
        except ImportError:
            raise UsageError("data.source = 'hub' needs the extra: pip install 'shoal[hub]'.") from None
        path, _, configuration = self.name.partition(":")
        try:
            rows = datasets.load_dataset(path, configuration or None, split="train")
        except Exception as error:  # network, name, configuration: the library raises a dozen unrelated types
            raise UsageError(f"data.dataset = '{self.name}' cannot be loaded: {error}") from None
        _require_field(self.field, rows.column_names, f"dataset {self.name}")
        return rows

    def documents(self) -> Iterator[str]:
        """Yield the field of every row; raises `UsageError` for a row without text."""
        for number, row in enumerate(self._rows.select_columns(self.field)):
            yield _text(row[self.field], self.field, f"dataset {self.name}, row {number}")

    def fingerprint(self, memo: Path) -> str:
        """Return the fingerprint that ``datasets`` computes from the files and all transformations."""
        return xxhash.xxh3_128_hexdigest(f"hub {self._rows._fingerprint} {self.field}".encode())


Corpus = FileCorpus | HubCorpus


def check_read(config: DataConfig) -> None:
    """Reject settings that the source does not read, when a run starts; a run that started with them resumes with
    them.

    Raises:
        UsageError: naming one, and the sources that read it.
    """
    for name, readers in _READERS.items():
        value = getattr(config, name)
        if config.source not in readers and value != DataConfig.model_fields[name].default:
            raise UsageError(
                f"data.{name} = {value!r} with data.source = '{config.source}', which does not read it."
                f"\n  Set data.source ({', '.join(readers)}), or leave data.{name} out."
            )


def open_corpus(config: DataConfig) -> Corpus:
    """Open the corpus of ``config.source``. Files are listed now, and read by `Corpus.documents`.

    Raises:
        UsageError: no path or dataset was given, or no file matches one.
    """
    if config.source == "stdlib":
        return FileCorpus("Python's standard library", _stdlib_files(), _read_source, "stdlib", plain=True)
    if config.source == "hub":
        if not config.dataset:
            raise UsageError("data.source = 'hub', but data.dataset is empty.\n  Name one: 'owner/name'.")
        return HubCorpus(config.dataset, config.field)
    if config.source == "synthetic":
        raise UsageError("data.source = 'synthetic' makes random tokens and has no documents.\n  Use another source.")
    suffix = {"text": "", "jsonl": ".jsonl", "parquet": ".parquet"}[config.source]
    files, name = find_files(config.paths, suffix, config.source), ", ".join(config.paths)
    if config.source == "text":
        return FileCorpus(name, files, _read_text, f"text {LONGEST_TEXT}", plain=True)
    read = _read_jsonl if config.source == "jsonl" else _read_parquet
    return FileCorpus(name, files, lambda path: read(path, config.field), f"{config.source} {config.field}")


def find_files(paths: tuple[str, ...], suffix: str, source: str) -> tuple[Path, ...]:
    """Return the files for ``paths``: each a file, a folder (its files with this suffix, at any depth) or a glob.

    The order is as given, and sorted inside a folder or glob. Hidden files are skipped; a repeated file is read once.

    Raises:
        UsageError: no paths, or one that matches no file.
    """
    if not paths:
        raise UsageError(f"data.source = '{source}', but data.paths is empty.\n  Give files, folders or globs.")
    files: dict[Path, None] = {}
    for given in paths:
        if not given:
            raise UsageError("data.paths: '' names no file.\n  Give files, folders or globs ('.' is this folder).")
        path = expanded(given, "data.paths")
        if path.is_file():
            found = [path]
        elif path.is_dir():
            inside = (p for p in path.rglob(f"*{suffix}") if p.is_file())
            found = sorted(p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
        else:
            found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not found:
            what = f"the folder holds no {suffix or 'files'}" if path.is_dir() else "no such file, folder or match"
            raise UsageError(f"data.paths: '{given}': {what} (relative to {Path.cwd()}).")
        files |= dict.fromkeys(p.resolve() for p in found)
    return tuple(files)


def _stdlib_files() -> tuple[Path, ...]:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UsageError(f"data.source = 'stdlib': this Python has no sources in {root}.\n  Use data.source = 'text'.")
    return tuple(sorted(files))


def _read_source(path: Path) -> Iterator[str]:
    try:
        yield read_bytes(path).decode()
    except UnicodeDecodeError:
        return  # a few sources intentionally declare another encoding


def _read_text(path: Path) -> Iterator[str]:
    with io.TextIOWrapper(open_to_read(path), encoding="utf-8", newline="") as file:
        try:
            while lines := file.readlines(LONGEST_TEXT):
                text = "".join(lines)
                if "\0" in text:
                    raise UsageError(
                        f"{path} is a binary file: it has a NUL character.\n  Leave it out with a glob in data.paths."
                    )
                yield text
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not UTF-8 text ({error.reason}).\n  Convert it, or leave it out with a glob in data.paths."
            ) from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with open_to_read(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except RecursionError:
                raise UsageError(f"{where} is nested too deeply to parse as JSON.") from None
            except ValueError as error:  # not JSON, or not UTF-8
                raise UsageError(f"{where}: not JSON: {error}.") from None
            if not isinstance(record, dict):
                raise UsageError(f"{where}: a {type(record).__name__}, not an object with the field '{field}'.")
            _require_field(field, record, where)
            yield _text(record[field], field, where)


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_field(field, file.schema_arrow.names, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0):
                    yield _text(value.as_py(), field, f"{path}, row {row}")
                    row += 1
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{path} is not a parquet file that can be read: {error}") from None


def _require_field(field: str, present: list[str] | dict, where: str) -> None:
    if field not in present:
        raise UsageError(f"{where}: no field '{field}' (data.field); {did_you_mean(field, present)}")


def _text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: the field '{field}' holds {type(value).__name__}, not text.")
    if not value.isascii():  # JSON can escape lone surrogates, which no encoding can represent
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: the field '{field}' is not Unicode text ({error.reason}).") from None
    return value
