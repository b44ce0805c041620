"""The TOML tables of the catalog: those that come with shoal, and a user's own beside them.

A user's file has the same tables under one more name: ``[accelerators.NAME]``, ``[links.NAME]``, ``[nodes.NAME]``,
``[models.NAME]``. An entry of the same name takes the place of shoal's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shoal.errors import UsageError, did_you_mean
from shoal.files import read_toml

T = TypeVar("T", bound=BaseModel)
KINDS = ("accelerators", "links", "nodes", "models", "software")
_own: dict[str, dict[str, dict[str, Any]]] = {}
_file = ""  # that a user's tables are from
_caches: list[Callable[[], Any]] = []


def table(kind: str) -> dict[str, dict[str, Any]]:
    """Every entry of one of `KINDS`, by name."""
    shipped = tomllib.loads(files("shoal.catalog").joinpath(f"{kind}.toml").read_text())
    return shipped | _own.get(kind, {})


def own(kind: str) -> frozenset[str]:
    """The names of the entries that are a user's."""
    return frozenset(_own.get(kind, {}))


def forgets(cache: Any) -> Any:
    """Have a cached reading of a table forgotten when a user's file is added."""
    _caches.append(cache.cache_clear)
    return cache


def add(path: str | Path) -> None:
    """Add a user's file; in its place, any that was added before. None of its entries is read before it is asked for.

    Raises:
        UsageError: no such file, not TOML, or a table that is none of `KINDS`.
    """
    global _file
    given = read_toml(path)
    for kind, entries in given.items():
        if kind not in KINDS:
            raise UsageError(f"{path}: a catalog has no table '{kind}'; {did_you_mean(kind, KINDS)}")
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise UsageError(f"{path}: [{kind}] holds tables with a name, as [{kind}.my-own]")
    forget()
    _own.update(given)
    _file = str(path)


def forget() -> None:
    """Back to shoal's own tables."""
    _own.clear()
    for clear in _caches:
        clear()


def entry(of: type[T], name: str, values: dict[str, Any], kind: str) -> T:
    """One entry, checked; with its name, if it has a place for that.

    Raises:
        UsageError: a value that is missing, unknown or out of its range.
    """
    if "name" in values:
        raise wrong(kind, name, "name: the table's own name is it")
    try:
        return of(**({"name": name} if "name" in of.model_fields else {}), **values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise wrong(kind, name, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def wrong(kind: str, name: str, what: str) -> UsageError:
    """An error in an entry, with the file that it is from."""
    return UsageError(f"{_file if name in own(kind) else 'catalog'}: [{kind}.{name}] {what}")
