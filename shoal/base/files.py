"""Read and write small files, with one clear error for each kind of failure, and check paths before work starts."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from shoal.base.errors import UsageError

T = TypeVar("T")
LARGEST = 64 << 20  # bytes: limit of files that are read into memory


def check_writable(path: Path | None, option: str, *suffixes: str, new: bool = False) -> None:
    """Reject, before any work, a file that cannot be written or (``new``) that would be overwritten.

    Args:
        path: the file; None passes.
        option: name of its option, for the message.
        suffixes: allowed suffixes of its name.

    Raises:
        UsageError: it has another suffix, its folder does not exist, it is a folder, or (``new``) it exists.
    """
    if path is None:
        return
    if suffixes and not path.name.endswith(suffixes):
        raise UsageError(f"{option} {path}: give a file ending in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}.\n  Make it, or name another file.")
    if path.is_dir():
        raise UsageError(f"{option} {path}: it is a folder.\n  Name a file in it.")
    if new and path.exists():
        raise UsageError(f"{option} {path}: the file exists, and is not overwritten.\n  Choose another name.")


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest existing ancestor."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))


def try_to_write(path: Path, size: int = 1) -> None:
    """Check that a folder, or its nearest existing ancestor, is writable, with a temporary file of ``size`` bytes.

    Raises:
        OSError: creating or writing the file failed: no permission, a full or read-only file system, or not a folder.
    """
    with tempfile.TemporaryFile(dir=nearest_existing(path)) as file:  # unnamed on Linux
        file.write(bytes(size))


def write_atomically(path: Path, text: str, *, new: bool = False) -> None:
    """Write a text file atomically; replace an existing file, or the target of a link.

    Args:
        new: fail if the file exists.

    Raises:
        OSError: it cannot be written, or it exists and ``new`` is set; an existing file is unchanged.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before it replaces the existing file
        if new:
            os.link(partial, path)
            partial.unlink()
            return
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def expanded(path: str | Path, option: str) -> Path:
    """Expand ``~`` and ``~user`` in a path.

    Raises:
        UsageError: no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{option}: '{path}': there is no home of that name.\n  Write the folder out.") from None


def read_bytes(path: str | Path, *, most: int = LARGEST) -> bytes:
    """Read the content of a file.

    Raises:
        UsageError: no such file, one that cannot be read, or more than ``most`` bytes.
    """
    path = Path(path)
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise UsageError(f"no such file: {path}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) > most:
        raise UsageError(f"{path} is larger than the {most >> 20} MiB that such a file can have.")
    return content


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; raises `UsageError` as `read_bytes` does, or if it is not UTF-8."""
    return _parsed(path, "UTF-8 text", str)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the values of a TOML file; raises `UsageError` as `read_bytes` does, or if it is not TOML."""
    return _parsed(path, "TOML", tomllib.loads)


def read_json(path: str | Path) -> Any:
    """Read the value of a JSON file; raises `UsageError` as `read_bytes` does, or if it is not JSON."""
    return _parsed(path, "JSON", json.loads)


def read_json_lines(
    path: Path, parse: Callable[[Any], T], what: str, *, skip_torn: bool = False
) -> list[T]:
    """Read the values of a JSON Lines file in order; empty if the file does not exist.

    A torn last line, from a writer that was killed, is skipped.

    Args:
        parse: converts the JSON value of a line.
        what: name of one value, for messages.
        skip_torn: skip torn lines anywhere, in a file that several processes appended to.

    Raises:
        UsageError: another line is not JSON, or `parse` raised a ValueError, TypeError or AttributeError.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, ValueError) and (skip_torn or number == len(lines)):
                continue
            raise UsageError(f"{path}, line {number}: it is no {what}.\n  Remove the line.") from None
    return found


def json_lines(values: Iterable[Any], *, compact: bool = False) -> str:
    """Format values as JSON lines, without spaces if compact."""
    separators = (",", ":") if compact else None
    return "".join(f"{json.dumps(value, separators=separators)}\n" for value in values)


def _parsed(path: str | Path, kind: str, parse: Callable[[str], T]) -> T:
    content = read_bytes(path)
    try:
        return parse(content.decode())
    except RecursionError:
        raise UsageError(f"{path} is no such file as shoal reads: its values are nested too deep.") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise UsageError(f"{path} is not {kind}: {error}") from None
