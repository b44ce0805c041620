"""A command's options from a command line: the fields of a section, their types, defaults and docstrings.

Values are checked by `shoal.base.section.validate`, which says what is wrong in the words of the config.

tyro reads command lines, and explains them. It takes longer to import than an estimate to make, so a line that is
nothing but ``--name value`` pairs is read here (`pairs`); whatever that does not understand is tyro's, errors and help
with it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from shoal.base.errors import UsageError
from shoal.base.option_errors import explain, options_of
from shoal.base.section import POSITIONAL, Section, docstrings, validate

T = TypeVar("T", bound=Section)

def parse(prog: str, options: type[T], args: list[str]) -> T:
    """A section from a command line.

    Args:
        prog: the words before ``args``, for the help.

    Raises:
        UsageError: an option does not exist (the nearest is named), or a value cannot be read or is out of its range.
        SystemExit: 0, after ``--help``.
    """
    given = read(prog, options.__doc__ or "", {"": options}, {"": defaults(options)}, args)[""]
    return validate(options, given, where="command line")


def listed(subjects: Mapping[str, str], width: int) -> list[str]:
    """Lines of a list of subjects and the first paragraph of what is said of each, as wide as the terminal.

    Args:
        width: of the column of names.
    """
    lines = []
    for name, said in subjects.items():
        paragraph = " ".join(said.split("\n\n")[0].split())
        columns, indent = max(width + 40, get_terminal_size().columns - 1), " " * (width + 3)
        lines.append(fill(paragraph, columns, initial_indent=f"  {name:<{width}} ", subsequent_indent=indent))
    return lines


def read(
    prog: str, what: str, sections: Mapping[str, type[BaseModel]], default: dict[str, dict[str, Any]], args: list[str]
) -> dict[str, dict[str, Any]]:
    """Unchecked values from a command line, by section.

    Args:
        what: is said above the help.
        sections: by the name that stands before their options ("" for none).
        default: values of each, without those that must be given.

    Raises:
        UsageError: an option does not exist, or a value cannot be read.
        SystemExit: 0, after ``--help``.
    """
    given = pairs(sections, args)
    needed = {section: _required(kind) for section, kind in sections.items()}
    if given is not None and all(names <= given[name].keys() | default[name].keys() for name, names in needed.items()):
        return {section: default[section] | given[section] for section in sections}
    import tyro

    default = {
        section: dict.fromkeys(needed[section], tyro.MISSING) | values for section, values in default.items()
    }
    fields: dict[str, Any] = {
        section: Annotated[plain(kind), tyro.conf.arg(name="")] if section == "" else plain(kind)
        for section, kind in sections.items()
    }
    try:
        with redirect_stderr(StringIO()):  # what tyro says of errors: `explain` says it in other words
            return tyro.cli(
                TypedDict("Arguments", fields),  # type: ignore[operator]  # its fields are known at run time alone
                default=default, prog=prog, description=what.strip(), args=args,
            )
    except SystemExit as end:
        if end.code == 0:
            raise
        raise explain(prog, options_of(sections), args) from None
    except BrokenPipeError:  # `--help | head`: the reader has seen enough, also for what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def plain(section: type[BaseModel]) -> Any:
    """The values of a section as tyro reads them: the same fields and docstrings, unchecked."""
    import tyro

    fields, documented = {}, docstrings(section)
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = plain(kind)
        about = field.description or documented.get(name)
        about = about and _paragraphs(about)
        marks = [tyro.conf.Positional if mark is POSITIONAL else mark for mark in field.metadata]
        fields[name] = Annotated[(kind, *marks, tyro.conf.arg(help=about))]
    values: Any = TypedDict(section.__name__, fields)  # type: ignore[misc]  # its name is known at run time alone
    values.__doc__ = section.__doc__
    return values


def _paragraphs(text: str) -> str:
    """Without the ends of lines inside paragraphs: a terminal has ends of its own."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The value of each field of a section that need not be given."""
    return {name: field.default for name, field in section.model_fields.items() if not field.is_required()}


def _required(section: type[BaseModel]) -> set[str]:
    return {name for name, field in section.model_fields.items() if field.is_required()}


def reject_unused(options: Section, names: Sequence[str], why: str) -> None:
    """Refuse those of some options that are given.

    Args:
        why: they are not read.

    Raises:
        UsageError: naming the first.
    """
    for name in names:
        given = getattr(options, name)
        if given != type(options).model_fields[name].default:
            option = f"--{name.replace('_', '-')}" + ("" if given is True else f" {given}")
            raise UsageError(f"{option}: {why}.\n  Leave it out.")


# ---- command lines of nothing but pairs ----------------------------------------------------------------------------


def pairs(sections: Mapping[str, type[BaseModel]], args: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """The values that a command line gives, where it consists of ``--name value``, ``--name=value`` and ``--flag``
    alone, each option once and each value plainly of its type; else None."""
    found: dict[str, dict[str, Any]] = {section: {} for section in sections}
    words = list(args)
    while words:
        word, equals, text = words.pop(0).partition("=")
        section, _, name = word.removeprefix("--").replace("-", "_").rpartition(".")
        field = sections[section].model_fields.get(name) if section in sections else None
        if not word.startswith("--") or field is None or POSITIONAL in field.metadata or name in found[section]:
            return None
        if field.annotation is bool:
            value = None if equals else True
        else:
            value = _value(field.annotation, text if equals else words.pop(0) if words else "")
        if value is None:
            return None
        found[section][name] = value
    return found


def _value(kind: Any, text: str) -> Any:
    """A text as a value of a type, of several the first that it fits; None where that is not plain."""
    if get_origin(kind) is Annotated:
        return _value(get_args(kind)[0], text)
    if get_origin(kind) in (Union, UnionType):
        if text == "None" and NoneType in get_args(kind):
            return None
        return next((value for each in get_args(kind) if (value := _value(each, text)) is not None), None)
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == text and choice is not None), None)
    if text.startswith("-") or not text:
        return None
    if kind is int:
        return int(text) if re.fullmatch("[0-9]{1,15}", text) else None
    if kind is float:
        return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[0-9]{1,2})?", text) else None
    return kind(text) if kind in (str, Path) else None
