"""Read a command's options from a command line: the fields of a section, their types, defaults and docstrings.

tyro reads the words and prints the help. `shoal.base.section.validate` checks the values, in the words of the config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from itertools import groupby
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

import tyro
from pydantic import BaseModel

from shoal.base.errors import UsageError
from shoal.base.section import Section, docstrings, validate

T = TypeVar("T", bound=Section)

POSITIONAL: Any = tyro.conf.Positional
"""In the annotation of a field: it stands in its place on the command line, without its name."""


def parse(prog: str, options: type[T], args: list[str], *, description: str = "") -> T:
    """A section from a command line.

    Args:
        prog: the words before ``args``, for the help.
        description: the first lines of the help (default: the section's docstring).

    Raises:
        UsageError: an option does not exist (the nearest is named), or a value cannot be read or is out of its range.
        SystemExit: 0, after ``--help``.
    """
    given = read(prog, description or options.__doc__ or "", {"": options}, {}, args)[""]
    return validate(options, given, source="command line")


def read(
    prog: str, description: str, sections: Mapping[str, type[BaseModel]], values: Mapping[str, dict[str, Any]],
    args: list[str],
) -> dict[str, dict[str, Any]]:
    """Unchecked values from a command line, by section.

    Args:
        description: the first lines of the help.
        sections: by the name that stands before their options ("" for none).
        values: take the place of some sections' defaults.

    Raises:
        UsageError: an option does not exist, or a value cannot be read.
        SystemExit: 0, after ``--help``.
    """
    fields: dict[str, Any] = {
        name: Annotated[_unchecked(section), tyro.conf.arg(name=name)] for name, section in sections.items()
    }
    default = {name: _defaults(section) | values.get(name, {}) for name, section in sections.items()}
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            return tyro.cli(
                TypedDict("Arguments", fields),  # type: ignore[operator]  # its fields are known at run time alone
                default=default, prog=prog, description=description.strip(), args=args,
            )
    except SystemExit as end:
        if end.code == 0:
            raise
        raise UsageError(f"{prog}: {_without_box(errors.getvalue())}") from None


def _unchecked(section: type[BaseModel]) -> Any:
    """The same fields and descriptions as a dict: tyro would check a model's values in pydantic's words."""
    fields, documented, kinds = {}, docstrings(section), get_type_hints(section)
    for name, field in section.model_fields.items():
        kind = kinds[name]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = _unchecked(kind)
        about = re.sub(r"(?<!\n)\n(?!\n)", " ", documented.get(name, ""))  # a terminal has line ends of its own
        if POSITIONAL in field.metadata:
            fields[name] = Annotated[kind, POSITIONAL, tyro.conf.arg(help=about, metavar=name.upper())]
        else:
            fields[name] = Annotated[kind, tyro.conf.arg(help=about)]
    values: Any = TypedDict(section.__name__, fields)  # type: ignore[misc]  # its name is known at run time alone
    values.__doc__ = section.__doc__
    return values


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    return {
        name: tyro.MISSING if field.is_required() else field.default for name, field in section.model_fields.items()
    }


def _without_box(text: str) -> str:
    """tyro's error without its frame and title: a line for each part of it."""
    rows = [row.strip("│| ") for row in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:-1]]
    parts = [" ".join(part) for rule, part in groupby(rows, lambda row: set(row) in ({"─"}, {"-"})) if not rule]
    return "\n  ".join(part.partition("  Got errors:")[0] for part in parts)  # of each type that a value may have


def listed(subjects: Mapping[str, str], width: int) -> list[str]:
    """List subjects with the first paragraph of their description, as wide as the terminal.

    Args:
        width: letters of the column of names.
    """
    lines = []
    for name, description in subjects.items():
        paragraph = " ".join(description.split("\n\n")[0].split())
        columns, indent = max(width + 40, get_terminal_size().columns - 1), " " * (width + 3)
        lines.append(fill(paragraph, columns, initial_indent=f"  {name:<{width}} ", subsequent_indent=indent))
    return lines


def reject_unused(options: Section, names: Sequence[str], why: str) -> None:
    """Reject options that have no effect on the result.

    Args:
        names: of the options.
        why: they have none.

    Raises:
        UsageError: naming the first that is given.
    """
    for name in names:
        given = getattr(options, name)
        if given != type(options).model_fields[name].default:
            option = f"--{name.replace('_', '-')}" + ("" if given is True else f" {given}")
            raise UsageError(f"{option}: {why}.\n  Leave it out.")
