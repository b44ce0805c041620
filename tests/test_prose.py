"""Words that the code and the docs avoid because readers stumble over them, each with plain replacements."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = sorted((ROOT / "shoal").rglob("*.py"))
STRINGS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
TYPES = {*STRINGS, tokenize.NAME}
BANNED_IN_NAMES = {"whole", "wholes", "alike", "told", "room", "foreseen", "anew", "here", "there"}

BANNED = {
    r"\bthose of\b": "repeat the noun",
    r'^r?"""(Of|As) [a-z`]': "begin with a verb or a noun",
    r"\b(told|tells?|said)\b": "report, print, state",
    r"\bgo(es|ing|ne)? on\b|\bwent on\b": "continue, resume",
    r"\brooms?\b": "folder, module, memory, space",
    r"\balike\b": "equal, identical, both",
    r"\bso (many|much|long)\b": "this many, up to, as long as",
    r"\b(nobody|whoever)\b": "no rank, no process, the one that",
    r"\bforese(en?|es)\b": "predict",
    r"\banew\b": "again",
    r"\bwhole\b": "full, complete, unsharded, global",
    r"\bin four of five\b": "80 % interval",
    r"\b(is|are|was|were) (not )?there\b(?! (a|an|any|no)\b)": "exists",
    r"\bbehind\b(?! (the|its|a) (proxy|firewall))": "after",
    r"\bwings?\b": "package",
}


@cache
def texts() -> list[tuple[str, str]]:
    """Return the lines of the pages, and of the strings and comments of the code, each with its place."""
    found = []
    for file in PAGES:
        place = file.relative_to(ROOT)
        found += [(f"{place}:{line}", text) for line, text in enumerate(file.read_text().splitlines(), 1)]
    for place, token in tokens():
        if token.type in STRINGS:
            lines = enumerate(token.string.splitlines(), token.start[0])
            found += [(f"{place}:{line}", text) for line, text in lines]
    return found


@cache
def tokens() -> list[tuple[str, tokenize.TokenInfo]]:
    """Return the tokens of the code, each with its file."""
    found = []
    for file in CODE:
        place, source = str(file.relative_to(ROOT)), io.StringIO(file.read_text(encoding="utf-8"))
        found += [(place, token) for token in tokenize.generate_tokens(source.readline) if token.type in TYPES]
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_words(pattern: str) -> None:
    found = [f"{place}: {text.strip()}" for place, text in texts() if re.search(pattern, text)]
    assert not found, f"write: {BANNED[pattern]}\n" + "\n".join(found)


def test_no_banned_words_in_names() -> None:
    names = {(place, token.string) for place, token in tokens() if token.type == tokenize.NAME}
    found = sorted(f"{place}: {name}" for place, name in names if BANNED_IN_NAMES & set(name.strip("_").split("_")))
    assert not found, "\n".join(found)


def test_functions_are_not_named_of() -> None:
    pattern = re.compile(r"^\s*def (\w+_of|of|of_\w+)\(", re.M)
    found = [f"{file.relative_to(ROOT)}: {name}" for file in CODE for name in pattern.findall(file.read_text())]
    assert not found, "a function is a verb:\n" + "\n".join(found)
