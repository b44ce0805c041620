"""A command's options from a command line: the fields of a section, their types, defaults and docstrings.

Values are checked by `shoal.config.validate`, which says what is wrong in the words of the config.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, TypedDict, TypeVar

import tyro
from pydantic import BaseModel

from shoal.config import Section, validate

T = TypeVar("T", bound=Section)


def parse(prog: str, options: type[T], args: list[str]) -> T:
    """A section from a command line.

    Args:
        prog: the words before ``args``, for the help.

    Raises:
        UsageError: a value is out of its range.
        SystemExit: 0 after ``--help``; 2 after an option that does not exist (the nearest is shown) or cannot be read.
    """
    given = read(prog, options.__doc__ or "", plain(options), defaults(options), args)
    return validate(options, given, where="command line")


def read(prog: str, what: str, fields: Any, default: dict[str, Any], args: list[str]) -> dict[str, Any]:
    """Unchecked values from a command line; ``what`` is said above the help."""
    try:
        return tyro.cli(fields, default=default, prog=prog, description=what.strip(), args=args)
    except BrokenPipeError:  # `--help | head`: the reader has seen enough, also for what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def plain(section: type[BaseModel]) -> Any:
    """The values of a section as tyro reads them: the same fields and docstrings, unchecked."""
    fields = {}
    for name, field in section.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        kind = plain(field.annotation) if nested else field.annotation
        fields[name] = Annotated[(kind, *field.metadata, tyro.conf.arg(help=field.description))]
    values = TypedDict(section.__name__, fields)  # type: ignore[operator]
    values.__doc__ = section.__doc__
    return values


def defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The value of each field of a section that is not given."""
    return {
        name: tyro.MISSING if field.is_required() else field.default for name, field in section.model_fields.items()
    }
