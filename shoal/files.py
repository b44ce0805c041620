"""Small files that others wrote: read whole, with one clear error for whatever is wrong with them; and what is written,
looked at first."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.errors import UsageError

LARGEST = 64 << 20  # bytes: what is read whole is never more


def check_place(path: Path | None, option: str, *, new: bool = False) -> None:
    """Refuse, before any work, a file that could not be written, or (``new``) that would be written over.

    Raises:
        UsageError: its folder is not there, or it is itself.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}.\n  Make it, or name another file.")
    if new and path.exists():
        raise UsageError(f"{option} {path}: it is there already, and is not overwritten.\n  Give another name.")


def read_bytes(path: str | Path, *, most: int = LARGEST) -> bytes:
    """The content of a file.

    Raises:
        UsageError: no such file, one that cannot be read, or more than ``most`` bytes.
    """
    path = Path(path)
    try:
        if not path.is_file():  # of a pipe or a device nobody knows when it ends
            raise UsageError(f"no such file: {path}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) > most:
        raise UsageError(f"{path} is larger than the {most >> 20} MiB that such a file can have.")
    return content


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        UsageError: see `read_bytes`; or it is not UTF-8.
    """
    return _parsed(path, "UTF-8 text", str)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        UsageError: see `read_bytes`; or it is not TOML.
    """
    return _parsed(path, "TOML", tomllib.loads)


def read_json(path: str | Path) -> Any:
    """The value of a JSON file.

    Raises:
        UsageError: see `read_bytes`; or it is not JSON.
    """
    return _parsed(path, "JSON", json.loads)


def _parsed(path: str | Path, kind: str, parse: Callable[[str], Any]) -> Any:
    content = read_bytes(path)
    try:
        return parse(content.decode())
    except RecursionError:
        raise UsageError(f"{path} is no such file as shoal reads: its values are nested too deep.") from None
    except ValueError as error:  # not of this kind, not UTF-8, or a number of thousands of digits
        raise UsageError(f"{path} is not {kind}: {error}") from None
