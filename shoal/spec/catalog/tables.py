"""TOML tables of the catalog: those shipped with shoal, and a user's own.

A user's file has the same tables with a prefix: ``[accelerators.NAME]``, ``[links.NAME]``, ``[nodes.NAME]``,
``[models.NAME]``. Its entries replace shoal's entries of the same name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_toml
from shoal.base.section import validate

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Table = dict[str, dict[str, Any]]
FOLDER = Path(__file__).parent
KINDS = ("accelerators", "links", "nodes", "models", "software")
_own: dict[str, Table] = {}
_file = ""  # the user's file
_checked: dict[str, dict[str, Any]] = {}


def table(kind: str) -> Table:
    """Return all entries of one of `KINDS` by name, unchecked."""
    return shipped(kind) | _own.get(kind, {})


@cache
def shipped(kind: str) -> Table:
    """Return the tables of one of shoal's own files."""
    return tomllib.loads((FOLDER / f"{kind}.toml").read_text("utf-8"))


def entries(kind: str, of: type[Model]) -> Mapping[str, Model]:
    """Return all entries of one of `KINDS` by name.

    Raises:
        UsageError: see `entry`.
    """
    if kind not in _checked:
        _checked[kind] = {name: entry(of, kind, name, complete(kind, name)) for name in table(kind)}
    return _checked[kind]


def complete(kind: str, name: str, known: Table | None = None) -> dict[str, Any]:
    """Return the values of an entry, with the values of the entry that its ``same_as`` names where it has none.

    An entry that names itself changes values of shoal's.

    Args:
        known: entries that ``same_as`` may name (default: all; for shoal's entries, shoal's).

    Raises:
        UsageError: there is no such entry, or none that does not lead back to this one.
    """
    known = known or (table(kind) if name in own(kind) else shipped(kind))
    values = dict(known[name])
    if (other := values.pop("same_as", None)) is None:
        return values
    if other == name and known is not shipped(kind) and name in shipped(kind):
        return complete(kind, name, shipped(kind)) | values
    others = {each: known[each] for each in known if each != name}
    if not isinstance(other, str) or other not in others:
        if isinstance(other, str) and other in table(kind):
            raise wrong(kind, name, f"same_as = '{other}' leads back to it")
        one = kind.removesuffix("s")
        raise wrong(kind, name, f"same_as: there is no {one} '{other}'; {did_you_mean(str(other), others)}")
    return complete(kind, other, others if other in own(kind) else shipped(kind)) | values


def find(name: str, known: Mapping[str, T], what: str) -> T:
    """Return the entry with this name.

    Raises:
        UsageError: the name is not in the catalog.
    """
    if name not in known:
        near = name.rpartition("/")[2].lower() if "/" in name else name  # owner/Name of the Hugging Face hub
        raise UsageError(f"{what} '{name}' is not in the catalog; {did_you_mean(near, known)}")
    return known[name]


def entry(of: type[Model], kind: str, name: str, values: Mapping[str, Any]) -> Model:
    """Validate one entry, and set its name if the section has a name field.

    Raises:
        UsageError: a value that is missing, unknown or out of range.
    """
    if "name" in values:
        raise wrong(kind, name, "name: the table's own name is it")
    named = {"name": name} if "name" in of.model_fields else {}
    if name in own(kind) and "source" in of.model_fields:
        named["source"] = _file  # of one's own numbers no other source is asked
    return validate(of, named | {**values}, source=_source(kind, name), prefix=f"{kind}.{name}")


def wrong(kind: str, name: str, what: str) -> UsageError:
    """Build an error in an entry, with the name of its file."""
    return UsageError(f"{_source(kind, name)}: {kind}.{name}: {what}")


def _source(kind: str, name: str) -> str:
    return _file if name in own(kind) else "catalog"


def own(kind: str) -> frozenset[str]:
    """Return the names of a user's entries."""
    return frozenset(_own.get(kind, {}))


def add_catalog(path: str | Path) -> None:
    """Add a TOML file with accelerators, links, nodes and models of your own to the catalog.

    It replaces any file added before. Entries are validated on first use.

    Args:
        path: file with tables ``[accelerators.NAME]``, ``[links.NAME]``, ``[nodes.NAME]``, ``[models.NAME]``; entries
            replace shoal's entries of the same name. ``same_as = "NAME"`` takes over the values of another entry that
            the table does not set.

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
    """Restore shoal's own tables."""
    _own.clear()
    _checked.clear()
