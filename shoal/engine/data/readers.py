"""Read the documents of one file: text, JSON lines, parquet or Arrow."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.data.files import DataFile

# A longer text file is cut at line ends into documents of about this many characters, to bound memory.
LONGEST_TEXT = 1 << 20

Document = str | np.ndarray
"""The text of a document, or its token ids: uint32 [tokens]."""


@dataclass
class Skipped:
    """Documents that were not used, counted by reason.

    Attributes:
        stop: raise an error for a document that cannot be read, instead of counting it.
        chat: documents are conversations.
        first: description of the first one of each reason, if its place is known.
    """

    stop: bool = True
    chat: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, reason: str, where: str = "") -> None:
        """Count a document that is left out on purpose."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if where:
            self.first.setdefault(reason, where)

    def unreadable(self, reason: str, message: str) -> None:
        """Count a document that cannot be read.

        Raises:
            UsageError: the message, if the run should stop at such a document.
        """
        if self.stop:
            raise UsageError(f"{message}\n  Mend it, leave its file out with a glob, or set data.unreadable = 'skip'.")
        self.count(reason, message)


def read_documents(file: DataFile, name: str, skipped: Skipped) -> Iterator[Document]:
    """Yield the documents of a file, in order.

    Args:
        name: the field that holds the text, in formats that have fields.

    Raises:
        UsageError: the file cannot be read, or a document cannot and the run should stop; it names the place.
    """
    try:
        match file.format:
            case "text":
                yield from _read_text(file, skipped)
            case "jsonl":
                yield from _read_jsonl(file, name, skipped)
            case _:
                yield from _read_columns(file, name, skipped)
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:  # pyarrow's errors of damage are bare
            raise UsageError(f"cannot read {file.path}: {error.strerror or error}.") from None
        skipped.unreadable("damaged files", f"{file.path} is damaged: {error}.")


def _read_text(file: DataFile, skipped: Skipped) -> Iterator[Document]:
    path = file.path
    with file.opened() as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as lines:
        try:
            while some := lines.readlines(LONGEST_TEXT):
                text = "".join(some)
                if "\0" in text:
                    skipped.unreadable("binary files", f"{path} is a binary file: it has a NUL character.")
                    return
                yield text
        except UnicodeDecodeError as error:
            skipped.unreadable("not UTF-8", f"{path} is not UTF-8 text ({error.reason}).")


def _read_jsonl(file: DataFile, name: str, skipped: Skipped) -> Iterator[Document]:
    with file.opened() as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"{file.path}, line {number}"
            try:
                record = json.loads(line)
            except RecursionError:
                skipped.unreadable("not JSON", f"{where} is nested too deeply to parse as JSON.")
                continue
            except ValueError as error:  # not JSON, or not UTF-8
                skipped.unreadable("not JSON", f"{where}: not JSON: {error}.")
                continue
            if not isinstance(record, dict):
                what = f"a {type(record).__name__}, not an object with the field '{name}'"
                skipped.unreadable("without text", f"{where}: {what}.")
            elif name not in record:
                skipped.unreadable("without text", f"{where}: {_no_field(name, record)}")
            else:
                yield from as_document(record[name], name, where, skipped)


def _read_columns(file: DataFile, name: str, skipped: Skipped) -> Iterator[Document]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    row = 0
    try:
        with file.opened() as raw:
            if file.format == "parquet":
                table = pyarrow.parquet.ParquetFile(raw)
                require_field(name, table.schema_arrow.names, str(file.path))
                batches: Iterable[Any] = table.iter_batches(batch_size=1024, columns=[name])
            else:
                stream = pyarrow.ipc.open_stream(raw)
                require_field(name, stream.schema.names, str(file.path))
                batches = stream
            for batch in batches:
                for value in batch.column(name):
                    yield from as_document(value.as_py(), name, f"{file.path}, row {row}", skipped)
                    row += 1
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        skipped.unreadable("damaged files", f"{file.path} is not a {file.format} file that can be read: {error}")


def require_field(name: str, present: Iterable[str], where: str) -> None:
    """Reject a table without the field; all its rows would be unreadable."""
    if name not in (names := list(present)):
        raise UsageError(f"{where}: {_no_field(name, names)}")


def _no_field(name: str, present: Iterable[str]) -> str:
    names = list(present)
    chat = "; data.chat reads conversations" if name == "text" and "messages" in names else ""
    return f"no field '{name}' (data.field); {did_you_mean(name, names)}{chat}"


def as_document(value: object, name: str, where: str, skipped: Skipped) -> Iterator[Document]:
    """Yield a document, if the value is text that UTF-8 can represent or a list of ids; of messages, their JSON."""
    if skipped.chat:
        messages = _as_messages(value)
        if messages is None:
            first = value[0] if isinstance(value, list) and value else None
            found = f"; the first message has {', '.join(sorted(map(str, first)))}" if isinstance(first, dict) else ""
            what = f"{where}: the field '{name}' holds no list of messages with a role and a content that are text"
            what += f"{found}."
            skipped.unreadable("not a conversation", what)
            return
        value = json.dumps(messages, ensure_ascii=False)
    if not isinstance(value, str):
        ids = _as_ids(value)
        if ids is None:
            what = f"{where}: the field '{name}' holds {type(value).__name__}, not text or a list of token ids."
            skipped.unreadable("without text", what)
        else:
            yield ids
        return
    if not value.isascii():  # JSON can escape lone surrogates, which no encoding can represent
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"{where}: the field '{name}' is not Unicode text ({error.reason})."
            skipped.unreadable("not Unicode text", message)
            return
    yield value


def _as_ids(value: object) -> np.ndarray | None:
    """Return a list of token ids as an array; None if the value is something else."""
    if not isinstance(value, list):
        return None
    try:
        ids = np.array(value) if value else np.empty(0, np.uint32)
    except (ValueError, OverflowError):  # lists of several lengths, or integers of more than 64 bits
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min(initial=0) < 0 or ids.max(initial=0) >= 1 << 32:
        return None
    return ids.astype(np.uint32)


def _as_messages(value: object) -> list[dict[str, str]] | None:
    """Return the role and content of each message; None if the value is no conversation."""
    if not isinstance(value, list) or not value:
        return None
    found = [
        {name: message.get(name) for name in ("role", "content")} if isinstance(message, dict) else {}
        for message in value
    ]
    texts = all(message and all(isinstance(text, str) for text in message.values()) for message in found)
    return found if texts else None  # type: ignore[return-value]  # all are texts
