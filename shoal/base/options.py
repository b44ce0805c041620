"""Parse a command line into a section; its fields define the options, types, defaults and help texts.

tyro parses the words, prints the help and explains errors. `shoal.base.section.validate` checks the values, with the
config's error messages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from inspect import cleandoc
from io import BytesIO, StringIO, TextIOWrapper
from itertools import groupby, takewhile
from shutil import get_terminal_size
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section, docstrings, validate
from shoal.base.usual_names import OTHER_VALUES, list_usual

T = TypeVar("T", bound=Section)

ANSI = re.compile(r"\x1b\[[0-9;]*m")  # of colours

FRAME = {"╭": "─", "├": "─", "╰": "─", "│": " "}
"""First character of a line of the help's frame, and what fills the line."""

POSITIONAL: Any = object()
"""Annotation of a positional argument. Another field may end in "_", which its option leaves out: a section has
attributes of its own, such as ``json``."""


def parse(prog: str, options: type[T], args: list[str], *, description: str = "") -> T:
    """Parse a command line into a section.

    Args:
        prog: the words before ``args``, for the help.
        description: first lines of the help (default: the section's docstring).

    Raises:
        UsageError: an unknown option (the nearest is suggested), or a value that cannot be parsed or is out of range.
        SystemExit: 0, after ``--help``.
    """
    given = read(prog, description or cleandoc(options.__doc__ or ""), {"": options}, {}, args)[""]
    return validate(options, given, source="command line")


def read(
    prog: str, description: str, sections: Mapping[str, type[BaseModel]], values: Mapping[str, dict[str, Any]],
    args: list[str],
) -> dict[str, dict[str, Any]]:
    """Parse a command line into unchecked values, by section.

    Args:
        description: first lines of the help.
        sections: sections by the prefix of their options ("" for none).
        values: values that replace some defaults, by section.

    Raises:
        UsageError: an unknown option, or a value that cannot be parsed.
        SystemExit: 0, after ``--help``.
    """
    default = {
        name: {key: field.default for key, field in section.model_fields.items() if not field.is_required()}
        | values.get(name, {}) for name, section in sections.items()
    }  # fmt: skip
    args = _spell_flags(sections, args)
    import tyro

    fields: dict[str, Any] = {
        name: Annotated[_unchecked(section), tyro.conf.arg(name=name, help="")] for name, section in sections.items()
    }
    tables = [(name, field) for name, section in sections.items() for field in _tables(section)]
    of_files = {(name, field): default[name].pop(field) for name, field in tables if field in default[name]}
    for name, field in of_files:
        default[name][field] = {}
    for name, section in sections.items():
        missing = (field for field, info in section.model_fields.items() if info.is_required())
        default[name] = dict.fromkeys(missing, tyro.MISSING) | default[name]
    errors, shown = StringIO(), TextIOWrapper(BytesIO(), encoding=(sys.stdout.encoding or "utf-8").lower())
    try:
        with redirect_stderr(errors), redirect_stdout(shown):
            found: dict[str, dict[str, Any]] = tyro.cli(
                TypedDict("Arguments", fields),  # type: ignore[operator]  # fields are only known at run time
                default=default, prog=prog, description=description.strip(), args=args,
            )
    except SystemExit as end:
        if end.code == 0:
            shown.seek(0)
            usage, *rows = ANSI.sub("", shown.read()).splitlines()
            width = get_terminal_size().columns
            rows = [row if row[:1] in FRAME else fill(row, width) for row in rows]
            rows = rows[rows[0] == "" :]  # a screen has 24 lines
            print(fill(usage, width, subsequent_indent="  "), *_join_rows(rows, width), sep="\n")
            raise
        for option in args:
            if positional := _find_positional(sections, option):
                raise UsageError(f"{prog}: {positional} is given without --{positional}."
                                 f"\n  Write {prog} {positional.upper()}.\n"
                                 f"  For full helptext, run {prog} --help") from None
            if (name := option.removeprefix("--")) != option and name and name in sections:  # tyro would list them all
                first = next(iter(sections[name].model_fields)).replace("_", "-")
                raise UsageError(f"{prog}: {option} is a section of options.\n  Give one of them, such as "
                                 f"{option}.{first}.\n  For full helptext, run {prog} --help") from None
        raise UsageError(f"{prog}: {_without_box(errors.getvalue(), sections)}") from None
    for (name, field), value in of_files.items():
        found[name][field] = found[name][field] or value
    return found


def _find_positional(sections: Mapping[str, type[BaseModel]], word: str) -> str | None:
    """Return the name of the positional argument that a word has as an option, if any."""
    name = word.partition("=")[0].removeprefix("--")
    field = sections[""].model_fields.get(name.replace("-", "_")) if "" in sections and word != name else None
    return name if field and POSITIONAL in field.metadata else None


def _tables(section: type[BaseModel]) -> list[str]:
    """Return the fields with sections by name, which a command line can only set by one text each."""
    kinds = {name: get_args(_bare(kind))[1:] for name, kind in get_type_hints(section).items()}
    return [
        name for name, kind in kinds.items()
        if name in section.model_fields and kind and isinstance(kind[0], type) and issubclass(kind[0], BaseModel)
    ]


def _spell_flags(sections: Mapping[str, type[BaseModel]], args: list[str]) -> list[str]:
    """Spell true and false as tyro does: of a flag --flag and --no-flag, of fields with other values True and False.

    An optional flag, which has three values, may be spelled as a flag too.
    """
    spelled: list[str | None] = list(args)
    for i, word in enumerate(args):
        option, equals, value = word.partition("=")
        section, _, name = option.removeprefix("--").replace("-", "_").rpartition(".")
        value = (value if equals else next(iter(args[i + 1 :]), "--")).capitalize()
        kinds = get_type_hints(sections[section]) if section in sections and option.startswith("--") else {}
        prefix, kind = f"--{section}{'.' * bool(section)}", _bare(kinds.get(name))
        if value not in ("True", "False"):
            bare = name if name in kinds else name.removeprefix("no_")
            if get_args(kinds.get(bare)) == (bool, NoneType) and not equals and value.startswith("--"):
                spelled[i] = f"{prefix}{bare.replace('_', '-')}={bare == name}"
        elif kind is bool:
            flag = name if value == "True" else f"no_{name}"
            spelled[i : i + 2 - bool(equals)] = [f"{prefix}{flag.replace('_', '-')}", *[None] * (not equals)]
        elif bool in get_args(kind):
            spelled[i if equals else i + 1] = f"{option}={value}" if equals else value
    return [word for word in spelled if word is not None]


@cache
def _unchecked(section: type[BaseModel]) -> Any:
    """Convert a section to a TypedDict with the same fields and help, since tyro would report pydantic's own errors."""
    import tyro

    fields, documented, kinds = {}, docstrings(section), get_type_hints(section)
    for name, field in section.model_fields.items():
        kind = kinds[name]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = _unchecked(kind)
        elif name in _tables(section):
            kind = dict[str, str]
        about = re.sub(r"(?<!\n)\n(?!\n)", " ", documented.get(name, ""))  # the terminal wraps lines
        positional = POSITIONAL in field.metadata
        hint = None if field.is_required() else _show_default
        shown = tyro.conf.arg(
            name=name[:-1].replace("_", "-") if name.endswith("_") else None, help=about, help_behavior_hint=hint,
            metavar=name.upper() if positional else _metavar(kind),
        )
        fields[name] = Annotated[kind, tyro.conf.Positional, shown] if positional else Annotated[kind, shown]
    values: Any = TypedDict(section.__name__, fields)  # type: ignore[misc]  # the name is only known at run time
    values.__doc__ = (section.__doc__ or "").partition(">>>")[0]
    return values


def _show_default(value: str) -> str:
    """Show a default, unless it means "not set"; the description names the value used then."""
    return "" if value in ("None", "", "''") else f"(default: {value})"


def _metavar(kind: Any) -> str | None:
    """Return how to show the values of an optional field without "None"; None keeps tyro's own text."""
    if NoneType not in get_args(kind):
        return None
    values = [_bare(each) for each in get_args(kind) if each is not NoneType]
    if len(values) > 1 or (isinstance(values[0], type) and issubclass(values[0], BaseModel)):
        return None
    if values[0] is bool:
        return "{True,False}"
    if get_origin(values[0]) is Literal:
        return f"{{{','.join(get_args(values[0]))}}}"
    if get_origin(values[0]) is tuple:
        kind = _bare(get_args(values[0])[0])
        each = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else kind.__name__.upper()
        return f"{each} [{each} ...]"
    return str(values[0].__name__).upper()


def _bare(kind: Any) -> Any:
    """Return a type without its annotations."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind


def _join_rows(lines: list[str], width: int) -> list[str]:
    """Shorten tyro's help: one frame for all arguments, and one row for an option whose help fits beside it. The row
    of --help itself is shown only if there is no other option."""
    joined: list[str] = []
    for line in lines:
        above = joined[-1] if joined else ""
        option, text = (each.strip("│ ") for each in (above, line))
        alone = re.match(r"│ -\S", above) and "  " not in option  # tyro puts at least two spaces before a help text
        if above.startswith("╰") and line.startswith("╭"):
            joined[-1] = line.replace("╭", "├").replace("╮", "┤")
        elif alone and line.startswith("│    ") and len(option) + len(text) + 6 <= width:
            joined[-1] = f"│ {option}  {text} │"
        else:
            joined.append(line)
    for first in [i for i, line in enumerate(joined) if line.startswith("│ -h, --help ")][::-1]:
        following = next((i for i in range(first + 1, len(joined)) if not joined[i].startswith("│    ")), first)
        if joined[following].startswith("│ --"):
            del joined[first:following]
    longest = max((len(line) for line in joined if line[:1] in FRAME), default=0)
    return [
        line[:-1] + FRAME[line[0]] * (longest - len(line)) + line[-1] if line[:1] in FRAME else line for line in joined
    ]


def _without_box(text: str, sections: Mapping[str, type[BaseModel]]) -> str:
    """Remove the frame and title of tyro's error, leaving one line per part; of several similar options only names."""
    framed = ANSI.sub("", text).splitlines()[1:-1]
    first = " ".join(takewhile(lambda row: not _is_rule(row), framed))  # wrapped to the terminal
    unknown = re.findall(r"--([^\s,=]+)", first)
    parts = []
    for rule, rows in groupby(framed, _is_rule):
        part = list(rows)
        similar = [row.split()[1].rstrip(",") for row in part if re.match(r"[│|] {5}--", row)]
        if len(similar) > 1:
            same = [option for option in similar if option.rpartition(".")[2] in unknown]
            part = [part[0], ", ".join(same or similar)]
        if not rule:  # "Got errors": one for each type that a value may have
            parts.append(" ".join(row.strip("│| ") for row in part).partition("  Got errors:")[0])
    if parts[0].startswith("Unrecognized"):
        usual = {name: found for name in unknown if (found := [*_by_usual_name(name, sections)])}
        lines = [f"For --{name}: {' or '.join(found)}{_other_value(name)}" for name, found in usual.items()]
        if len(unknown) == 1 and usual:
            parts[1:-1] = [f"Perhaps you meant: {', '.join(usual[unknown[0]])}{_other_value(unknown[0])}"]
        else:
            similar = [part for part in parts[1:-1] if not any(f"to --{name}:" in part for name in usual)]
            parts[1:-1] = [*lines, *similar]
    choice = r"(invalid choice '(.+)' for argument \S+)\. Expected one of \((.+)\)\."
    parts[0] = re.sub(choice, _suggest_choice, parts[0])
    parts[0] = re.sub(r"invalid literal for int\(\) with base 10: (.+)", r"\1 is not an integer", parts[0])
    parts[0] = re.sub(r"could not convert string to float: (.+)", r"\1 is not a number", parts[0])
    parts[0] = re.sub(r"no type matching (.+) could be instantiated from \[(.+)\]\.", _name_kinds, parts[0])
    return "\n  ".join(parts)


def _suggest_choice(found: re.Match[str]) -> str:
    near = did_you_mean(found[2], re.findall("'([^']*)'", found[3]))
    return f"{found[1]}; {near}" if near.startswith("did") else found[0]


def _is_rule(row: str) -> bool:
    return set(row.strip("│| ")) in ({"─"}, {"-"})


def _name_kinds(found: re.Match[str]) -> str:
    kinds = [{"INT": "an integer", "FLOAT": "a number"}.get(kind, kind) for kind in found[1].split("|")]
    return f"{found[2]} is not {' or '.join(kind for kind in kinds if kind != '{None}')}"


def _by_usual_name(unknown: str, sections: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Yield the options that other trainers call by an unknown name, or that have this name in another section."""
    for known in list_usual(unknown.rpartition(".")[2].replace("-", "_")):
        for section, kind in sections.items():
            for path in _list_fields(kind, (section,) if section else ()):
                option = "--" + ".".join(path).replace("_", "-")
                if known in (path[-1], ".".join(path), option):
                    yield option


def _other_value(unknown: str) -> str:
    return OTHER_VALUES.get(unknown.rpartition(".")[2].replace("-", "_"), "")


def _list_fields(section: type[BaseModel], outer: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _list_fields(field.annotation, (*outer, name))
        elif POSITIONAL not in field.metadata:
            yield (*outer, name)


def listed(subjects: Mapping[str, str], width: int) -> list[str]:
    """List subjects with the first paragraph of their description, wrapped to the terminal's width."""
    lines = []
    for name, description in subjects.items():
        paragraph = " ".join(description.split("\n\n")[0].split())
        columns, indent = max(width + 40, get_terminal_size().columns - 1), " " * (width + 3)
        lines.append(fill(paragraph, columns, initial_indent=f"  {name:<{width}} ", subsequent_indent=indent))
    return lines


def reject_unused(options: Section, names: Sequence[str], why: str) -> None:
    """Reject options that have no effect on the result.

    Raises:
        UsageError: naming the first such option that is set.
    """
    for name in names:
        given = getattr(options, name)
        if given != type(options).model_fields[name].default:
            option = f"{'--no-' if given is False else '--'}{name.rstrip('_').replace('_', '-')}"
            option += "" if isinstance(given, bool) else f" {given}"
            raise UsageError(f"{option}: {why}.\n  Leave it out.")
