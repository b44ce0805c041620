"""What is wrong with a command line that could not be read: one message in the words of the house, not tyro's.

tyro decides that it cannot be read; here is only found out why, word by word.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from shoal.base.errors import UsageError
from shoal.base.section import POSITIONAL, Section, docstrings, validate

SCALARS = (bool, int, float, str, Path, NoneType)


@dataclass(frozen=True, eq=False)
class Option:
    """What a command line can give a value."""

    key: str
    """As in a config: ``train.steps``."""

    field: FieldInfo
    about: str
    """What it is."""

    place: bool
    """It stands in its place, without its name."""

    @property
    def typed(self) -> str:
        """Its name as it is typed: ``--train.global-batch``."""
        return self.key.upper() if self.place else "--" + self.key.replace("_", "-")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that its value may have."""
        kind = self.field.annotation
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        return tuple(get_args(each)[0] if get_origin(each) is Annotated else each for each in kinds)

    @property
    def words(self) -> int:
        """Words that its value has; -1 for any number."""
        if self.field.annotation is bool:
            return 0
        several = [kind for kind in self.kinds if kind not in SCALARS and get_origin(kind) is not Literal]
        if not several:
            return 1
        args = get_args(several[0])
        return len(args) if get_origin(several[0]) is tuple and Ellipsis not in args else -1


def explain(prog: str, options: Sequence[Option], args: Sequence[str]) -> UsageError:
    """The error that says what is wrong, and how to mend it.

    Args:
        prog: the words before ``args``.
        options: all that there are.
    """
    named = {option.typed: option for option in options if not option.place}
    named |= {_negated(name): option for name, option in named.items() if option.words == 0}
    given, loose = _read(named, list(args))
    wrong = next(filter(None, (_wrong(prog, named, *each) for each in given)), None)
    wrong = wrong or _misplaced(prog, options, {named[word] for word, _ in given if word in named}, loose)
    wrong = wrong or f"{prog} cannot read {shlex.join(args)}"
    return UsageError(f"{wrong}\n  `{prog} --help` lists all options, with what each takes.")


def options_of(sections: Mapping[str, type[BaseModel]]) -> list[Option]:
    """All options of a command's sections, and of those inside them."""
    found = []
    for section, kind in sections.items():
        documented = docstrings(kind)
        for name, field in kind.model_fields.items():
            key = f"{section}.{name}" if section else name
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found += options_of({key: field.annotation})
            else:
                about = field.description or documented.get(name, "")
                found.append(Option(key, field, about, POSITIONAL in field.metadata))
    return found


def _read(named: Mapping[str, Option], words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """The options that are given, each with the words of its value, and the loose words."""
    given: list[tuple[str, list[str]]] = []
    loose = []
    while words:
        word, equals, text = words.pop(0).partition("=")
        if not word.startswith("--"):
            loose.append(word + equals + text)
            continue
        word = word.replace("_", "-")
        takes = named[word].words if word in named else -1
        values = [text] if equals else []
        while words and not words[0].startswith("--") and (takes < 0 or len(values) < takes):
            values.append(words.pop(0))
        given.append((word, values))
    return given, loose


def _wrong(prog: str, named: Mapping[str, Option], word: str, texts: list[str]) -> str | None:
    """What is wrong with an option that is given, or with its value."""
    if word not in named:
        last = word.removeprefix("--").rpartition(".")[2]
        near = [name for name in named if name.removeprefix("--").rpartition(".")[2] == last]
        near = near or difflib.get_close_matches(word, named, n=1)
        return f"{prog} has no option '{word}'" + (f"; did you mean '{' or '.join(near)}'?" if near else ".")
    takes = named[word].words
    if takes == 0:
        return f"{word} takes no value, and '{texts[0]}' is given." if texts else None
    if len(texts) < takes:
        return f"{word} takes {takes} value{'s' * (takes > 1)}, and {len(texts) or 'none'} is given."
    return _misfit(named[word], texts)


def _negated(name: str) -> str:
    section, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{last}"


def _misfit(option: Option, texts: list[str]) -> str | None:
    """What a config's loader says of a value, None where it fits."""
    fields: dict[str, Any] = {option.key: (option.field.annotation, option.field)}
    line = create_model("Line", __base__=Section, **fields)
    said = []
    for kind in option.kinds:
        try:
            validate(line, {option.key: _as(kind, texts)}, where="command line")
            return None
        except UsageError as error:
            said.append(str(error))
        except ValueError:  # of another type
            continue
    if not said:
        try:
            validate(line, {option.key: texts[0]}, where="command line")
        except UsageError as error:
            said.append(str(error))
    return next(iter(said), None)


def _as(kind: Any, texts: list[str]) -> Any:
    """Words as a value of one type.

    Raises:
        ValueError: they are none.
    """
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        kinds = kinds[:1] * len(texts) if Ellipsis in kinds else kinds
        return [_if_it_is(kind, text) for kind, text in zip(kinds, texts, strict=True)]
    if get_origin(kind) is dict:
        _, values = get_args(kind)
        return {key: _if_it_is(values, text) for key, text in zip(texts[::2], texts[1::2], strict=True)}
    if get_origin(kind) is Annotated:
        return _as(get_args(kind)[0], texts)
    if kind is bool or kind is NoneType or get_origin(kind) is Literal:
        choices = {bool: (True, False), NoneType: (None,)}.get(kind) or get_args(kind)
        return choices[[str(choice) for choice in choices].index(texts[0])]
    return kind(texts[0])


def _if_it_is(kind: Any, text: str) -> Any:
    """A word as a value of a type, or as it is: the loader then says what is wrong with it."""
    try:
        return _as(kind, [text])
    except ValueError:
        return text


def _misplaced(prog: str, options: Sequence[Option], given: set[Option], loose: list[str]) -> str | None:
    """What must be given and is not, or is given and belongs to nothing."""
    places = [option for option in options if option.place]
    for option in [option for option in options if not option.place and option not in given] + places[len(loose):]:
        if option.field.is_required():
            return f"{prog} needs {option.typed}: {option.about}"
    return f"{prog}: '{loose[len(places)]}' belongs to no option." if len(loose) > len(places) else None
