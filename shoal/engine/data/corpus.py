"""Sources of documents: the standard library, files of several formats, or a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shoal.base.errors import UsageError
from shoal.base.files import read_bytes, read_text, write_atomically
from shoal.engine.data import readers
from shoal.engine.data.files import DataFile, find_files, find_saved, open_raw
from shoal.engine.data.readers import Document, Skipped, as_document, read_documents, require_field
from shoal.spec.config import DataConfig, SourceConfig

if TYPE_CHECKING:
    import datasets

# Excluded from the stdlib corpus: installed packages, and tests, which some systems package separately (without
# them the corpus is nearly the same 13 MB on every system).
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

_READERS = {
    "paths": ("files", "text", "jsonl", "parquet", "megatron"), "field": ("files", "jsonl", "parquet", "hub"),
    "dataset": ("hub",), "dataset_split": ("hub", "files"), "unreadable": ("files", "text", "jsonl", "parquet", "hub"),
    "chat": ("files", "jsonl", "parquet", "hub"),
}  # fmt: skip


@dataclass(frozen=True)
class FileCorpus:
    """A fixed sequence of documents, from files in order.

    Attributes:
        field: the field that holds the documents, in formats that have fields.
        reader: the readers and their options, as part of the fingerprint.
        sources: whether the files are sources of Python, of which some intentionally declare another encoding than
            UTF-8 and are left out.
    """

    name: str
    files: tuple[DataFile, ...]
    field: str
    reader: str
    sources: bool = False

    @property
    def size(self) -> int | None:
        """UTF-8 bytes of all documents; None if unknown before reading."""
        if any(file.format != "text" or file.compressed or not isinstance(file.path, Path) for file in self.files):
            return None
        return sum(file.path.stat().st_size for file in self.files)

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield all documents, in the same order each time.

        Args:
            skipped: says what to do with documents that cannot be read, and counts them.

        Raises:
            UsageError: a document cannot be read, naming the file and where possible the line.
        """
        for file in self.files:
            yield from _read_source(file, skipped) if self.sources else read_documents(file, self.field, skipped)

    def fingerprint(self, memo: Path) -> str:
        """Return a hash of the files' contents, independent of their names; equal hashes mean equal documents.

        A file at a URL is not read: it counts by name, size, and the time or checksum that its store reports.

        Args:
            memo: folder that caches the hash by paths, sizes and modification times, so that files are read once.
        """
        reader = self.reader.encode()
        listing = xxhash.xxh3_128(reader)
        for file in self.files:
            listing.update(f"{file.path}\0{_state(file)}\n".encode())
        remembered = memo / listing.hexdigest()
        with suppress(UsageError):  # missing, or not readable
            if re.fullmatch(r"[0-9a-f]{32}", known := read_text(remembered)):
                return known
        content = xxhash.xxh3_128(reader)
        for file in self.files:
            try:
                if not isinstance(file.path, Path):
                    content.update(_state(file).encode())
                    continue
                with open_raw(file.path) as raw:
                    content.update(hashlib.file_digest(raw, xxhash.xxh3_128).digest())  # type: ignore[arg-type]
            except OSError as error:
                raise UsageError(f"cannot read {file.path}: {error.strerror}.") from None
        memo.mkdir(parents=True, exist_ok=True)
        write_atomically(remembered, content.hexdigest())
        return content.hexdigest()


def _state(file: DataFile) -> str:
    """Return what changes when a file is written again."""
    if isinstance(file.path, Path):
        stat = file.path.stat()
        return f"{stat.st_size}\0{stat.st_mtime_ns}"
    return str(file.path.fs.ukey(file.path.path))


@dataclass(frozen=True)
class HubCorpus:
    """One split of a Hugging Face dataset: ``owner/name``, ``owner/name:configuration`` or a folder.

    Its rows are streamed: only the tokenised shards are kept.
    """

    name: str
    field: str
    split: str
    size: None = None

    @cached_property
    def _builder(self) -> datasets.DatasetBuilder:
        try:
            import datasets
        except ImportError:
            raise UsageError("data.source = 'hub' needs the extra: pip install 'shoal[hub]'.") from None
        path, _, configuration = self.name.partition(":")
        try:
            return datasets.load_dataset_builder(path, configuration or None)
        except Exception as error:  # network, name, configuration: the library raises a dozen unrelated types
            raise self._failed(error) from None

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Yield the field of every row; raises `UsageError` for a row without a document."""
        where = f"dataset {self.name}"
        try:
            rows = self._builder.as_streaming_dataset(split=self.split)
            names = rows.column_names or next(iter(rows), {self.field: ""})
        except Exception as error:
            raise self._failed(error) from None
        require_field(self.field, names, where)
        number = -1
        try:
            for number, row in enumerate(rows.select_columns(self.field)):
                yield from as_document(row[self.field], self.field, f"{where}, row {number}", skipped)
        except UsageError:
            raise
        except Exception as error:  # while its files are read
            raise UsageError(f"{where}: cannot read after row {number}: {error}") from None

    def fingerprint(self, memo: Path) -> str:
        """Return a hash of the dataset's version, which ``datasets`` takes from its files."""
        built = f"{self._builder.dataset_name} {self._builder.config_id} {self._builder.hash}"
        return xxhash.xxh3_128_hexdigest(f"hub {built} {self.split} {self.field}".encode())

    def _failed(self, error: Exception) -> UsageError:
        return UsageError(f"data.dataset = '{self.name}' cannot be loaded: {error}")


Corpus = FileCorpus | HubCorpus


def check_read(config: DataConfig) -> None:
    """Reject settings that the source does not read, when a run starts; a run that started with them resumes with
    them.

    Raises:
        UsageError: naming one, and the sources that read it.
    """
    if config.mixture:
        _check_source(config, "data", "a data.mixture", ("source", *_READERS))
    for name, source in config.sources().items() if config.mixture else [("", config)]:
        chosen = "auto" if source.reads == "files" else source.reads
        where = f"data.mixture.{name}" if name else "data"
        if name and chosen == "synthetic":
            raise UsageError(f"{where}.source = 'synthetic' is random tokens, which cannot be mixed.\n  Leave it out.")
        unread = tuple(field for field, sources in _READERS.items() if source.reads not in sources)
        _check_source(source, where, f"{where}.source = '{chosen}'", unread)


def _check_source(config: DataConfig, where: str, chosen: str, unread: tuple[str, ...]) -> None:
    for name in unread:
        if (value := getattr(config, name)) != DataConfig.model_fields[name].default:
            readers = " or ".join(source.replace("files", "auto") for source in _READERS.get(name, ()))
            remedy = f"Set {where}.source ({readers.replace(' or ', ', ')}), or leave" if readers else "Leave"
            if config.mixture:
                remedy = f"Give it to a source of the mixture ({where}.mixture.{next(iter(config.mixture))}), or leave"
            raise UsageError(
                f"{where}.{name} = {value!r} with {chosen}, which does not read it.\n  {remedy} {where}.{name} out."
            )


def open_corpus(config: SourceConfig) -> Corpus:
    """Open the corpus of ``config.source``. Files are listed now, and read by `Corpus.documents`.

    Raises:
        UsageError: no path or dataset was given, or no file matches one.
    """
    if config.reads == "stdlib":
        return FileCorpus("Python's standard library", _stdlib_files(), "", "stdlib", sources=True)
    if config.reads == "hub":
        if not config.dataset:
            raise UsageError("data.source = 'hub', but data.dataset is empty.\n  Name one: 'owner/name'.")
        if saved := find_saved(Path(config.dataset), config.dataset_split):
            return _file_corpus(config.dataset, saved, config.read_field)
        return HubCorpus(config.dataset, config.read_field, config.dataset_split)
    if config.reads in ("synthetic", "megatron"):
        raise UsageError(f"data.source = '{config.reads}' has token ids and no documents.\n  Use another source.")
    files = find_files(config)
    if config.chat and (plain := [file for file in files if file.format == "text"]):
        raise UsageError(f"data.chat: {plain[0].path} is plain text, without messages.\n  Give JSON lines or parquet.")
    return _file_corpus(", ".join(config.paths), files, config.read_field)


def _file_corpus(name: str, files: tuple[DataFile, ...], field: str) -> FileCorpus:
    formats = {file.format for file in files}
    # Files of one format have the fingerprint of that source, however they were found.
    kind = formats.pop() if len(formats) == 1 else " ".join(file.format for file in files)
    reader = f"text {readers.LONGEST_TEXT}" if kind == "text" else f"{kind} {field}"
    packed = "".join(file.path.suffix for file in files if file.compressed)
    return FileCorpus(name, files, field, f"{reader} {packed}".rstrip())


def _stdlib_files() -> tuple[DataFile, ...]:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UsageError(f"data.source = 'stdlib': this Python has no sources in {root}.\n  Use data.source = 'text'.")
    return tuple(DataFile(path, "text") for path in sorted(files))


def _read_source(file: DataFile, skipped: Skipped) -> Iterator[Document]:
    try:
        assert isinstance(file.path, Path)
        yield read_bytes(file.path).decode()
    except UnicodeDecodeError:
        skipped.count("not UTF-8", str(file.path))
