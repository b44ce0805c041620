"""The words that `shoal explain WORD` looks up: two sentences, the page of the course, a command."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

PAGES = (
    "hardware", "roofline", "one-device", "memory", "data-parallelism", "collectives", "zero", "tensor",
    "sequence-context", "pipelines", "experts", "together", "optimizers", "number-formats", "relaxed", "automatic",
    "failures", "planning", "scaling-laws",
)  # fmt: skip
"""Pages of the course, in the order in which one reads them."""


class Word(NamedTuple):
    """An entry of the glossary.

    Attributes:
        name: the word.
        about: two sentences.
        page: one of `PAGES`.
        command: a command of that page.
        also: other names.
    """

    name: str
    about: str
    page: str
    command: str
    also: tuple[str, ...] = ()


def page_file(page: str) -> str:
    """Return the file of a page, relative to docs/course.

    >>> page_file("roofline")
    '02-roofline.md'
    """
    return f"{PAGES.index(page) + 1:02}-{page}.md"


@cache
def read_words() -> dict[str, Word]:
    """Return the entries by name, in alphabetical order."""
    text = resources.files("shoal.labs.glossary").joinpath("words.toml").read_text("utf-8")
    words = [Word(name, **{**entry, "also": (*entry.get("also", ()),)}) for name, entry in tomllib.loads(text).items()]
    return {word.name: word for word in sorted(words)}


def find_word(given: str) -> Word | None:
    """Return the entry with a name or another name, or None. Case, hyphens and spaces make no difference.

    >>> find_word("Ring_AllReduce").name, find_word("ZeRO 3").name, find_word("sheep")
    ('ring', 'zero', None)
    """
    return _by_spelling().get(_squeeze(given))


def nearest_words(given: str, more: tuple[str, ...] = (), count: int = 4) -> list[str]:
    """Return the names that are spelled most like the given word, of the glossary and of ``more``, one of each entry.

    >>> nearest_words("buble", count=1), nearest_words("autogradd", count=1)
    (['bubble'], ['autograd'])
    """
    names = {_squeeze(name): (word.name, name) for word in read_words().values() for name in (word.name, *word.also)}
    names |= {_squeeze(name): (name, name) for name in more}
    near = difflib.get_close_matches(_squeeze(given), names, n=3 * count, cutoff=0.6)
    found: dict[str, str] = {}
    for spelling in near:
        entry, name = names[spelling]
        found.setdefault(entry, name)
    return list(found.values())[:count]


@cache
def _by_spelling() -> dict[str, Word]:
    words = read_words().values()
    return {_squeeze(name): word for word in words for name in (word.name, *word.also)}


def _squeeze(name: str) -> str:
    return re.sub(r"[\s_!-]+", "", name.lower())
