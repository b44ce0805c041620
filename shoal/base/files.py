"""Read and write small files, with one clear error for each kind of failure, and check paths before work starts.

All files that shoal reads pass `open_to_read`, and all that it writes pass `open_to_append` or `write_atomically`: only
regular files are opened, and no link is written through.
"""

from __future__ import annotations

import csv
import difflib
import errno
import io
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from shoal.base.errors import UsageError
from shoal.base.terminal import warn

T = TypeVar("T")
LARGEST = 64 << 20  # bytes: limit of a file that is read into memory, and of one line of a longer file
LONGEST = 1 << 30  # bytes: limit of a file that is read line by line
MOST_DAMAGED = 1000  # lines: a file with more is something else
DEEPEST, MOST_DOTS = 32, 1000  # nested tables of a TOML file, and dots in one key
LINK = "it is a symbolic link, which is not followed: remove it"


def check_writable(path: Path | None, option: str, *suffixes: str, new: bool = False) -> None:
    """Reject, before any work, a file that cannot be written or (``new``) that would be overwritten.

    Args:
        path: the file; None passes.
        option: name of its option, for the message.
        suffixes: allowed suffixes of its name.

    Raises:
        UsageError: it has another suffix, its folder does not exist, it is a folder, it is no name of a
            file, or (``new``) it exists.
    """
    if path is None:
        return
    if suffixes and not path.name.endswith(suffixes):
        raise UsageError(f"{option} {path}: give a file ending in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}.\n  Make it, or name another file.")
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise UsageError(f"{option} {path}: {getattr(error, 'strerror', None) or error}.") from None
    if path.is_symlink():
        raise UsageError(f"{option} {path}: it is a symbolic link, which is not followed.\n  Name its target.")
    if path.is_dir():
        raise UsageError(f"{option} {path}: it is a folder.\n  Name a file in it.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option} {path}: it is a device or a pipe.\n  Name a file.")
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


def open_to_append(path: str | Path) -> io.BufferedWriter:
    """Open a regular file at its end; create it, private to the user, if it does not exist.

    Raises:
        OSError: a link, a folder, a pipe or a device, or it cannot be written.
    """
    return open(path, "ab", opener=_open_regular)


def write_atomically(path: Path, content: str | bytes | Iterable[bytes], *, new: bool = False) -> None:
    """Write a file atomically, in place of an existing one.

    Args:
        content: all of it, or its parts in order.

    Raises:
        OSError: it is a link or no regular file, it cannot be written, or it exists and ``new`` is set; an existing
            file is unchanged.
    """
    mode = None
    if os.path.lexists(path) and not new:
        found = path.lstat()
        _check_regular(path, found)
        mode = stat.S_IMODE(found.st_mode)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a killed process that had the same number
        with partial.open("xb") as file:
            content = content.encode() if isinstance(content, str) else content
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())  # before it replaces the existing file
        if new:
            claim(partial, path)
            return
        if mode is not None:
            partial.chmod(mode)
        partial.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def claim(partial: Path, path: Path) -> None:
    """Rename a file, unless another one has its new name.

    Raises:
        FileExistsError: it has.
    """
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        path.open("xb").close()
        partial.replace(path)
    else:
        partial.unlink()


def make_folder(path: Path) -> Path:
    """Create a folder, with its parents, unless it exists, and return it.

    Raises:
        OSError: it is a link, which may lead to files of others, or cannot be created.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))
    return path


def open_to_read(path: str | Path) -> io.BufferedReader:
    """Open a regular file, or the target of a link, for reading.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe or a device, which may never end; does not wait for one.
    """
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file without waiting for the other end of a pipe; do not follow a link to a file that is written."""
    if flags & os.O_ACCMODE != os.O_RDONLY:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            error.strerror = LINK
        raise
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFLNK: LINK, stat.S_IFDIR: "it is a folder", stat.S_IFIFO: "it is a pipe"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "it is a device or a socket")
        raise OSError(errno.EINVAL, kind, os.fspath(path))


def expanded(path: str | Path, option: str) -> Path:
    """Expand ``~`` and ``~user`` in a path.

    Raises:
        UsageError: no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{option}: '{path}': there is no home of that name.\n  Write the folder out.") from None


def read_bytes(path: str | Path) -> bytes:
    """Read the content of a file.

    Raises:
        UsageError: no such file, one that cannot be read, or more than `LARGEST` bytes.
    """
    try:
        with open_to_read(path) as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}{name_similar(Path(path))}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL or a surrogate in its name
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if len(content) > LARGEST:
        raise UsageError(f"{path} is larger than the {LARGEST >> 20} MiB that such a file can have.")
    return content


def name_similar(path: Path) -> str:
    """Return the end of a message about a file that does not exist: the file in its folder with the most similar name.

    A folder that does not exist is named; "" if no name is similar.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"\n  There is no folder {folder}."
    with suppress(OSError):
        names = [name for name in islice(os.listdir(folder), 10_000) if Path(name).suffix == path.suffix]
        for near in difflib.get_close_matches(path.name, names, cutoff=0.7):
            if (folder / near).is_file():
                return f"; did you mean '{folder / near}'?"
    return ""


def read_tail(path: str | Path, most: int) -> str:
    """Read the last ``most`` bytes of a log, which others may be writing; "" if it cannot be read."""
    try:
        with open_to_read(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; raises `UsageError` as `read_bytes` does, or if it is not UTF-8."""
    return _parsed(path, "UTF-8 text", str)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the values of a TOML file; raises `UsageError` as `read_bytes` does, or if it is not TOML."""
    return _parsed(path, "TOML", _parse_toml)


def read_json(path: str | Path) -> Any:
    """Read the value of a JSON file; raises `UsageError` as `read_bytes` does, or if it is not JSON."""
    return _parsed(path, "JSON", json.loads)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file by the names in its first row; a missing cell is "".

    Raises:
        UsageError: as `read_bytes`, or it is not CSV.
    """
    names, *rows = _parsed(path, "CSV", parse_csv) or [[]]
    return [dict(zip_longest(names, row[: len(names)], fillvalue="")) for row in rows if row]


def parse_csv(text: str) -> list[list[str]]:
    """Parse the rows of CSV text.

    Raises:
        ValueError: it is not CSV, or has a field beyond the csv module's limit.
    """
    try:
        return list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(str(error)) from None


def read_json_lines(path: Path, parse: Callable[[Any], T], what: str) -> list[T]:
    """Read the values of a JSON Lines file in order; empty if the file does not exist.

    Damaged lines (a full disk, a crash of the machine) are left out, with one note on stderr. A last line without its
    end is left out without a note: its writer was killed, or is still writing it.

    Args:
        parse: converts the JSON value of a line. It raises ValueError, TypeError, LookupError or AttributeError for a
            wrong value.
        what: name of one value, for messages.

    Raises:
        UsageError: the file cannot be read, is too large, or has lines, but none that is a ``what``.
    """
    found: list[T] = []
    damaged: list[int] = []
    number = 0
    try:
        with open_to_read(path) as file:
            while (line := file.readline(LARGEST + 1)) and len(damaged) <= MOST_DAMAGED:
                number += 1
                if len(line) > LARGEST or file.tell() > LONGEST:
                    raise UsageError(f"{path} has more than {LONGEST >> 20} MiB, or {LARGEST >> 20} MiB in a line.")
                try:
                    found.append(parse(json.loads(line)))
                except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                    if line.endswith(b"\n"):
                        damaged.append(number)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if damaged and (not found or len(damaged) > MOST_DAMAGED):
        raise UsageError(f"{path}, line {damaged[0]}: it is no {what}, as are all others.\n  Move the file elsewhere.")
    if damaged:
        more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(f"{path}: left out line {damaged[0]}, which is no {what}{more}.")
    return found


def json_lines(values: Iterable[Any], *, compact: bool = False) -> str:
    """Format values as JSON lines, without spaces if compact."""
    separators = (",", ":") if compact else None
    return "".join(f"{json.dumps(value, separators=separators)}\n" for value in values)


def _parse_toml(text: str) -> dict[str, Any]:
    if any(line.partition("=")[0].count(".") > MOST_DOTS for line in text.splitlines()):
        raise RecursionError  # tomllib takes time by the square of the dots
    values = tomllib.loads(text)
    tables: list[tuple[Any, int]] = [(values, 0)]
    while tables:
        table, depth = tables.pop()
        if depth > DEEPEST:
            raise RecursionError
        inside = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
        tables += ((value, depth + 1) for value in inside)
    return values


def _parsed(path: str | Path, kind: str, parse: Callable[[str], T]) -> T:
    content = read_bytes(path)
    try:
        return parse(content.decode())
    except RecursionError:
        raise UsageError(f"{path} is no such file as shoal reads: its values are nested too deep.") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise UsageError(f"{path} is not {kind}: {error}") from None
