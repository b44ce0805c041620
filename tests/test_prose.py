"""Words that the code and the docs avoid because readers stumble over them, each with plain replacements."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = sorted((ROOT / "shoal").rglob("*.py"))
STRINGS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}

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


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page, or of the strings and comments of a source file, with their numbers."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in STRINGS:
            yield from enumerate(token.string.splitlines(), token.start[0])


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_words(pattern: str) -> None:
    found = [f"{file.relative_to(ROOT)}:{line}: {text.strip()}"
             for file in [*PAGES, *CODE] for line, text in texts(file) if re.search(pattern, text)]
    assert not found, f"write: {BANNED[pattern]}\n" + "\n".join(found)


@pytest.mark.parametrize("word", ["whole", "wholes", "alike", "told", "room", "foreseen", "anew", "here", "there"])
def test_no_banned_words_in_names(word: str) -> None:
    found = set()
    for file in CODE:
        for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and word in token.string.strip("_").split("_"):
                found.add(f"{file.relative_to(ROOT)}: {token.string}")
    assert not found, "\n".join(sorted(found))


def test_functions_are_not_named_of() -> None:
    pattern = re.compile(r"^\s*def (\w+_of|of|of_\w+)\(", re.M)
    found = [f"{file.relative_to(ROOT)}: {name}" for file in CODE for name in pattern.findall(file.read_text())]
    assert not found, "a function is a verb:\n" + "\n".join(found)
