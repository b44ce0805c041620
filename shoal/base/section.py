"""Base class of config sections: frozen, unknown keys rejected, errors named by config key."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.usual_names import OTHER_VALUES, list_usual

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # which pydantic does not export

T = TypeVar("T", bound=BaseModel)
Each = TypeVar("Each")
NonEmpty = Annotated[tuple[Each, ...], Field(min_length=1)]
"""Tuple with at least one value."""

LARGEST = 2**53  # integers up to this are exact in float64
SHOWN = 80  # characters shown of a wrong value
SURROGATE = re.compile("[\ud800-\udfff]")


class _Explaining(ModelMetaclass):
    """Metaclass whose classes raise a `UsageError` with a line for each wrong value, where pydantic raises its own."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except ValidationError:
            fields = _with_texts(fields)
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise UsageError("\n".join(_list_errors(cls, error, cls.__name__, ()))) from None


def _with_texts(value: Any) -> Any:
    """Return values with text in the place of paths, also in lists and tables."""
    if isinstance(value, dict):
        return {key: _with_texts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_with_texts, value))
    return str(value) if isinstance(value, Path) else value


class Section(BaseModel, metaclass=_Explaining):
    """Base class of sections: immutable, with unknown keys rejected. The docstring below a field describes it.

    Raises:
        UsageError: a line for each unknown key and each bad value, as `validate` raises; ``tp="2"`` is a number here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    documented_in: ClassVar[type[BaseModel] | None] = None  # another section with the docstrings of some fields

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what `repr` and `print` show: the fields that differ from their defaults."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields.get(name or "")
            if field is None or value != field.get_default(call_default_factory=True):
                yield name, value


def validate(section: type[T], values: dict[str, Any], *, source: str, prefix: str = "") -> T:
    """Build a section from plain values, with strict types: 1 is not a boolean, and "1" is not a number.

    Args:
        source: source of the values, for messages.
        prefix: name of the section in the config, if messages should show it before the keys.

    Raises:
        UsageError: one line for each unknown key (the nearest key is suggested) and each bad value.
    """
    outer = (prefix,) if prefix else ()
    if wrong := list(_precheck(values, outer)):
        raise UsageError("\n".join(f"{source}: {line}" for line in wrong))
    try:  # strict, via JSON, where a list may represent a tuple and a string a path
        return section.model_validate_json(json.dumps(values, default=_as_json), strict=True)
    except ValidationError as error:
        raise UsageError("\n".join(_list_errors(section, error, source, outer))) from None


def _list_errors(section: Any, error: ValidationError, source: str, outer: tuple[str, ...]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    errors = error.errors()
    items = {each["loc"][:-1] for each in errors}
    for each in errors:
        if each["type"] == "too_short" and each["loc"] in items:
            continue  # pydantic counts only the items that are right
        start, what = _explain(section, each, outer)
        found.setdefault(start, []).append(what)  # a field with several types has one message for each
    return (f"{source}: {start}{', or '.join(dict.fromkeys(whats))}" for start, whats in found.items())


def _precheck(values: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield errors that do not depend on the field."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _precheck(value, (*keys, str(key)))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _precheck(value, keys)
    elif isinstance(values, int) and abs(values) > LARGEST:
        yield f"{_printable('.'.join(keys))} is a number beyond 2^53."
    elif isinstance(values, (str, Path)) and SURROGATE.search(str(values)):
        yield f"{_printable('.'.join(keys))} = {truncate(str(values))} is not Unicode text."


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)  # a scalar of NumPy or torch, or a path


def _explain(section: Any, error: Any, outer: tuple[str, ...]) -> tuple[str, str]:
    """Return the start of a message, equal for all errors of a field, and the error itself."""
    keys = _keys(section, error["loc"])
    dotted = _printable(".".join((*outer, *keys)))
    if error["type"] == "extra_forbidden":
        usual = list_usual(keys[-1]) if len(keys) < 3 else []
        elsewhere = _find_fields(section, usual)
        if usual[:1] and usual[0].startswith("--"):
            return f"there is no key '{dotted}'; ", f"it is an option of the command line: {usual[0]}"
        if elsewhere:
            near = f"did you mean '{' or '.join(elsewhere)}'?"
            return f"there is no key '{dotted}'; ", near + _explain_keys(section, error, near)
        for key in keys[:-1]:
            section = section.model_fields[key].annotation if hasattr(section, "model_fields") else get_args(section)[1]
        known = next((name for name in list_usual(keys[-1]) if name in section.model_fields), keys[-1])
        near = did_you_mean(known, section.model_fields)
        return f"there is no key '{dotted}'; ", near + (_explain_keys(section, error, near) if len(keys) == 1 else "")
    what = "input should be a table" if error["type"] == "model_type" else error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = did_you_mean(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]))
        what = f"there is no such value; {near}" if near.startswith("did") else what
    of_table = error["type"] in ("missing", "value_error") and isinstance(error["input"], dict)  # several keys
    given = "" if of_table else f" = {truncate(error['input'])}"
    return f"{dotted}{given}: ", f"{what[0].lower()}{what[1:]}"


def _find_fields(section: Any, names: Iterable[str]) -> list[str]:
    """Return the fields of its sections that have one of these names, with or without the section's."""
    return [f"{name}.{field}" for known in names for name, info in section.model_fields.items()
            for field in getattr(info.annotation, "model_fields", {}) if known in (field, f"{name}.{field}")]


def _explain_keys(section: Any, error: Any, near: str) -> str:
    """Return what the keys of an unknown table, such as one of another trainer, are called.

    Args:
        near: the table that is proposed in its place. Keys that this one has need no explanation.
    """
    values = error["input"] if isinstance(error["input"], dict) else {}
    found = {key: _find_fields(section, list_usual(key)) for key in values if isinstance(key, str)}
    known = [f"{_printable(key)} is {' or '.join(fields)}{OTHER_VALUES.get(key, '')}" for key, fields in found.items()
             if fields and not any(near == f"did you mean '{field.removesuffix(f'.{key}')}'?" for field in fields)]
    return f" Of its keys: {'; '.join(known)}." if known else ""


def _keys(section: Any, place: tuple[str | int, ...]) -> list[str]:
    """Return the config keys that lead to an error, without list indices and names of union members."""
    keys: list[str] = []
    for key in place:
        fields = getattr(section, "model_fields", None)
        table = get_origin(section) is dict
        if not isinstance(key, str) or (fields is None and not table) or key == "[key]":
            break
        keys.append(key)
        section = get_args(section)[1] if table else fields[key].annotation if fields and key in fields else None
    return keys


def truncate(value: Any) -> str:
    """Return the ``repr`` of a wrong value, its first `SHOWN` characters."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _printable(key: str) -> str:
    """Escape unprintable characters in a key, and truncate it."""
    return truncate(key)[1:-1] if len(key) > SHOWN or not key.isprintable() else key


def plain(config: BaseModel) -> dict[str, Any]:
    """Return nested plain values for TOML or JSON, without unset fields."""
    return config.model_dump(mode="json", exclude_none=True)


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field. pydantic can collect them too, but for all classes at import."""
    other = getattr(section, "documented_in", None)
    found = docstrings(other) if other else {}
    for kind in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        found |= _module_docstrings(kind.__module__).get(kind.__name__, {})
    return found


@cache
def _module_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstring below each field of each class at the top level of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, dict[str, str]] = {}
    for kind in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        for field, below in pairwise(kind.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                    found.setdefault(kind.name, {})[name] = inspect.cleandoc(about)
    return found
