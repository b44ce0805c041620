"""The TOML tables of the catalog: those that come with shoal, and a user's own beside them.

A user's file has the same tables under one more name: ``[accelerators.NAME]``, ``[links.NAME]``, ``[nodes.NAME]``,
``[models.NAME]``. An entry of the same name takes the place of shoal's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_toml

T = TypeVar("T")
Reading = TypeVar("Reading", bound="_Cached")
Model = TypeVar("Model", bound=BaseModel)
FOLDER = Path(__file__).parent
KINDS = ("accelerators", "links", "nodes", "models", "software")
_own: dict[str, dict[str, dict[str, Any]]] = {}
_file = ""  # that a user's tables are from
_caches: list[Callable[[], None]] = []


class _Cached(Protocol):
    def cache_clear(self) -> None: ...


class OnDemand(Mapping[str, T]):
    """Values by name, each made when it is first asked for: to read the whole catalog takes longer than to estimate.

    Args:
        make: a value, from its name.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], T]):
        self._names, self._make = dict.fromkeys(names), make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            self._made[name] = self._make(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def table(kind: str) -> Mapping[str, dict[str, Any]]:
    """Every entry of one of `KINDS`, by name."""
    texts, given = _shipped(kind), _own.get(kind, {})
    return OnDemand([*texts, *given], lambda name: given[name] if name in given else tomllib.loads(texts[name])[name])


def entries(kind: str, of: type[Model]) -> Mapping[str, Model]:
    """The same, checked: a user's own all of them, shoal's where they are asked for.

    Raises:
        UsageError: see `entry`.
    """
    values = table(kind)
    found = OnDemand(values, lambda name: entry(of, name, values[name], kind))
    for name in _own.get(kind, {}):
        found[name]
    return found


def _shipped(kind: str) -> dict[str, str]:
    """The TOML of each of shoal's own entries, by name: from its head to the next."""
    _, *found = re.split(r"^\[", (FOLDER / f"{kind}.toml").read_text("utf-8"), flags=re.MULTILINE)
    return {text.partition("]")[0].strip('"'): f"[{text}" for text in found}


def own(kind: str) -> frozenset[str]:
    """The names of the entries that are a user's."""
    return frozenset(_own.get(kind, {}))


def forgets(cache: Reading) -> Reading:
    """Have a cached reading of a table forgotten when a user's file is added."""
    _caches.append(cache.cache_clear)
    return cache


def add_catalog(path: str | Path) -> None:
    """Add a TOML file with accelerators, links, nodes and models of your own to the catalog.

    It takes the place of any file that was added before. No entry is read before it is asked for.

    Args:
        path: with tables ``[accelerators.NAME]``, ``[links.NAME]``, ``[nodes.NAME]``, ``[models.NAME]``; an entry of
            the same name takes the place of shoal's.

    Raises:
        UsageError: no such file, not TOML, or a table that is none of `KINDS`.

    >>> import pathlib, shoal, tempfile
    >>> from shoal.spec.catalog.tables import forget
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine = pathlib.Path(folder) / "mine.toml"
    ...     _ = mine.write_text('[links.mine]\\nbandwidth = 1e9\\nlatency = 1e-6\\nsource = "measured"\\n')
    ...     shoal.add_catalog(mine)
    >>> forget()
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


def entry(of: type[Model], name: str, values: dict[str, Any], kind: str) -> Model:
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
