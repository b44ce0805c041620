"""Files of a corpus: found by path, folder, glob or URL, and opened whether compressed or not."""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, cast

from upath import UPath

from shoal.base.addresses import AnyPath, to_path
from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import expanded, open_to_read
from shoal.spec.config import SourceConfig

Format = Literal["text", "jsonl", "parquet", "arrow"]

FORMATS: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Formats by the suffix of a file's name, without that of its compression."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Codecs of pyarrow by the last suffix of a file's name."""


@dataclass(frozen=True)
class DataFile:
    """One file of a corpus, and the format in which it is read."""

    path: AnyPath
    format: Format

    @property
    def compressed(self) -> bool:
        """Whether its name has the suffix of a compression."""
        return self.path.suffix in COMPRESSIONS

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file, decompressed. Damage raises OSError without an error number."""
        raw = open_raw(self.path)
        with raw:
            if not self.compressed:
                yield raw
                return
            import pyarrow

            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), COMPRESSIONS[self.path.suffix]) as stream:
                yield cast(BinaryIO, io.BufferedReader(stream, 1 << 20))


def open_raw(path: AnyPath) -> BinaryIO:
    """Open a local file or an object for reading."""
    return open_to_read(path) if isinstance(path, Path) else path.open("rb")


def find_files(config: SourceConfig) -> tuple[DataFile, ...]:
    """Return the files of ``config.paths``: each a file, a folder (its files of a format, at any depth) or a glob.

    The order is as given, and sorted inside a folder or glob. Hidden files are skipped; a repeated file is read once.
    In a folder made by `datasets.Dataset.save_to_disk`, or `DatasetDict.save_to_disk`, the order is that of its rows.

    Raises:
        UsageError: no paths, one that matches no file, or a file without a known suffix.
    """
    forced = None if config.reads == "files" else config.reads
    if not config.paths:
        raise UsageError(f"data.source = '{forced}', but data.paths is empty.\n  Give files, folders or globs.")
    files: dict[str, DataFile] = {}
    for given in config.paths:
        if not given:
            raise UsageError("data.paths: '' names no file.\n  Give files, folders or globs ('.' is this folder).")
        path = _address(given)
        if forced is None and (saved := find_saved(path, config.dataset_split)):
            found = list(saved)
        elif path.is_dir():
            inside = _sorted(each for each in _walk(path) if not _hidden(each, path))
            found = [DataFile(each, kind) for each in inside if (kind := _format(each, forced, inside=True))]
            if not found:
                wanted = " or ".join(s for s, f in FORMATS.items() if forced in (None, f)) if forced != "text" else ""
                raise _nothing(given, f"the folder holds no {wanted or 'files'}")
        else:
            named = [path] if path.is_file() else _sorted(each for each in _glob(path) if each.is_file())
            found = [DataFile(each, _format(each, forced) or _unknown(each)) for each in named]
        if not found:
            pair = "" if "://" in given or not Path(f"{path}.idx").is_file() else (
                f"\n  Name a file of the pair of Megatron: {given}.idx")
            raise UsageError(f"{_nothing(given, 'no such file, folder or match')}{pair}")
        for file in found:
            path = file.path.resolve()
            files.setdefault(str(path), DataFile(path, file.format))
    return tuple(files.values())


def _address(given: str) -> AnyPath:
    local = given.removeprefix("file://") if given.startswith("file:///") else given
    return to_path(given, "data.paths") if "://" in local else expanded(local, "data.paths")


def _format(path: AnyPath, forced: str | None, *, inside: bool = False) -> Format | None:
    """Return the format of a file; None for an unknown suffix or, inside a folder, one that is not read."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else path.name
    known = FORMATS.get(Path(name).suffix)
    if forced is None:
        return known
    return None if inside and forced not in ("text", known) else cast(Format, forced)


def _unknown(path: AnyPath) -> NoReturn:
    raise UsageError(
        f"data.paths: {path}: its name has no suffix of a known format: {', '.join(FORMATS)}, and these with "
        f"{', '.join(COMPRESSIONS)}."
        "\n  Set data.source = 'text' to read it as text, or 'jsonl' or 'parquet'."
    )


def _nothing(given: str, what: str) -> UsageError:
    where = "" if "://" in given else f" (relative to {Path.cwd()})"
    return UsageError(f"data.paths: '{given}': {what}{where}.")


def _sorted(paths: Iterable[AnyPath]) -> list[AnyPath]:
    return sorted(paths, key=lambda path: tuple(path.parts))


def _hidden(path: AnyPath, folder: AnyPath) -> bool:
    return any(part.startswith(".") for part in path.parts[len(folder.parts) :])


def _walk(folder: AnyPath) -> Iterator[AnyPath]:
    """Yield the files of a folder at any depth."""
    if isinstance(folder, Path):
        yield from (path for path in folder.rglob("*") if path.is_file())
    else:
        yield from (UPath(folder.fs.unstrip_protocol(found)) for found in folder.fs.find(folder.path))


def _glob(path: AnyPath) -> Iterator[AnyPath]:
    if isinstance(path, Path):
        yield from map(Path, glob.glob(str(path), recursive=True))
    elif glob.has_magic(path.path):
        yield from (UPath(path.fs.unstrip_protocol(found)) for found in path.fs.glob(path.path))


def find_saved(path: AnyPath, split: str) -> tuple[DataFile, ...]:
    """Return the files of a folder made by save_to_disk, in the order of its rows; empty for another path.

    Raises:
        UsageError: it has no such split, or its description is damaged.
    """
    if (several := path / "dataset_dict.json").is_file():
        splits = _description(several, "splits")
        if split not in splits:
            raise UsageError(f"data.dataset_split = '{split}': {path} has no such split; {did_you_mean(split, splits)}")
        path = path / split
    if not (single := path / "state.json").is_file():
        return ()
    return tuple(DataFile(path / name, "arrow") for name in _description(single, "_data_files"))


def _description(path: AnyPath, key: str) -> list[str]:
    try:
        with open_raw(path) as file:
            names = [each["filename"] if isinstance(each, dict) else each for each in json.loads(file.read())[key]]
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError(f"'{key}' holds no names")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} does not describe a saved dataset: {error}.") from None
    return names
