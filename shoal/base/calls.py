"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import collections.abc
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import truncate
from shoal.base.usual_names import list_usual

P = ParamSpec("P")
Result = TypeVar("Result")

WRONG: Any = object()
"""Result of `convert` for a value of another type."""

BOUNDED = {
    "PositiveInt": "int > 0",
    "NonNegativeInt": "int >= 0",
    "PositiveFloat": "float > 0",
    "NonNegativeFloat": "float >= 0",
}
"""How a message shows the types of pydantic with bounds."""

REMEDIES = {
    "EstimatedRun": "shoal.estimate(...).run is one",
    "RunConfig": 'shoal.load_config("run.toml") reads one',
    "Layout": "such as shoal.Layout(dp=2)",
    "Program": 'such as shoal.build_program(shoal.SCHEDULES["1f1b"], ranks=4, microbatches=8)',
    "Schedule": 'such as shoal.SCHEDULES["1f1b"]',
    "DataConfig": 'shoal.load_config("run.toml").data is one',
}
"""How to make a value of a type, which ends a message."""


def check_arguments(function: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap a function to refuse arguments of another type than annotated, before any work starts.

    Equivalent values are converted: scalars of NumPy and torch, floats such as 1e4 for integers, a path for text, and
    any iterable for a sequence.

    >>> @check_arguments
    ... def repeat(text: str, times: int = 2) -> str:
    ...     return text * times
    >>> repeat(Path("a"), 3.0)
    'aaa'
    >>> repeat("a", "3")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: repeat: times = '3' is of type str.
      Give int.
    """
    expected, called = signature(function), function.__qualname__.removesuffix(".__init__")
    parameters = expected.parameters
    kinds_of = cache(partial(get_type_hints, function, include_extras=True))
    any_option = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())

    def check(parameter: Parameter, value: Any, name: str) -> Any:
        text = str(parameter.annotation)
        if (found := convert(kinds_of().get(parameter.name, Any), value)) is not WRONG:
            return found
        kinds = text.split(" | ")
        number = isinstance(value, (int, float)) and not BOUNDED.keys().isdisjoint(kinds)
        given = "" if value is None or number else f" is of type {type(value).__name__}"
        remedy = next((f": {remedy}" for word, remedy in REMEDIES.items() if word in kinds), "")
        allowed = " or ".join(BOUNDED.get(kind, kind) for kind in kinds)
        raise UsageError(f"{called}: {name} = {truncate(value)}{given}.\n  Give {allowed}{remedy}.")

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> Result:
        for name in () if any_option else options.keys() - parameters.keys():
            usual = (each.rpartition(".")[2].strip("-").replace("-", "_") for each in list_usual(name))
            near = did_you_mean(next((each for each in usual if each in parameters), name), parameters)
            raise UsageError(f"{called}: there is no argument '{name}'; {near}")
        bound = expected.bind_partial(*args, **options)
        for name, value in bound.arguments.items():
            parameter = parameters[name]
            match parameter.kind:
                case Parameter.VAR_POSITIONAL:
                    bound.arguments[name] = tuple(check(parameter, each, name) for each in value)
                case Parameter.VAR_KEYWORD:
                    bound.arguments[name] = {key: check(parameter, value[key], key) for key in value}
                case _ if value is not parameter.default:
                    bound.arguments[name] = check(parameter, value, name)
        return function(*bound.args, **bound.kwargs)

    return checked


def convert(kind: Any, value: Any) -> Any:
    """Return a value as the type of an annotation, the same object if it is of that type; `WRONG` if it cannot be.

    The values of a ``Literal`` are not compared: functions name those that are allowed.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object, Parameter.empty) or isinstance(kind, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        found = [each for each in (convert(arm, value) for arm in inner) if each is not WRONG]
        return next((each for each in found if each is value), found[0] if found else WRONG)
    if origin is Annotated:
        return _check_bounds(convert(inner[0], value), inner[1:])
    if origin is Literal:
        return value if isinstance(value, tuple(map(type, inner))) else WRONG
    if origin is collections.abc.Callable:
        return value if callable(value) else WRONG
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _convert_table(inner, value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _convert_items(origin, inner, value)
    return _convert_one(kind, value)


def _check_bounds(value: Any, bounds: Sequence[Any]) -> Any:
    """Return a number unless it is `WRONG` or outside the bounds of a type such as pydantic's ``PositiveInt``."""
    for bound in bounds if value is not WRONG else ():
        below, least = getattr(bound, "gt", None), getattr(bound, "ge", None)
        if (below is not None and not value > below) or (least is not None and not value >= least):
            return WRONG
    return value


def _convert_table(inner: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return WRONG
    key, item = inner or (Any, Any)
    found = {convert(key, name): convert(item, each) for name, each in value.items()}
    return WRONG if any(each is WRONG for each in (*found, *found.values())) else found


def _convert_items(origin: type, inner: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return WRONG
    items: list[Any] = getattr(value, "tolist", lambda: [*value])()  # of an array of NumPy or torch
    kinds = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(items)
    if len(kinds) != len(items):
        return WRONG
    found = [convert(kind, item) for kind, item in zip(kinds, items, strict=True)]
    if any(each is WRONG for each in found):
        return WRONG
    unchanged = isinstance(value, origin) and all(new is old for new, old in zip(found, items, strict=True))
    return value if unchanged else tuple(found) if origin is tuple else found


def _convert_one(kind: Any, value: Any) -> Any:
    if kind in (int, float, bool) and getattr(value, "ndim", None) == 0:  # of NumPy or torch
        value = value.item()
    if isinstance(value, bool) and kind is int:  # its subclass
        return WRONG
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int):
        return value
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    return value if isinstance(value, kind or types.NoneType) else WRONG
