"""Words that the code and the docs avoid because readers stumble over them, each with plain replacements."""

import ast
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
def pages() -> list[tuple[str, str]]:
    """Return the lines of the pages, each with its place."""
    return [
        (f"{file.relative_to(ROOT)}:{number}", line)
        for file in PAGES for number, line in enumerate(file.read_text().splitlines(), 1)
    ]


@cache
def sources() -> list[tuple[Path, str]]:
    return [(file, file.read_text(encoding="utf-8")) for file in CODE]


@cache
def texts(file: Path, source: str) -> list[tuple[str, str]]:
    """Return the lines of the strings and comments of a file of code, each with its place."""
    return [
        (f"{file.relative_to(ROOT)}:{number}", line)
        for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type in STRINGS
        for number, line in enumerate(token.string.splitlines(), token.start[0])
    ]


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_words(pattern: str) -> None:
    lines = pages().copy()
    anywhere = re.compile(pattern.removeprefix("^"))  # strings begin in the middle of lines
    for file, source in sources():
        if anywhere.search(source):  # few have it in a name: to read all as tokens takes seconds
            lines += texts(file, source)
    found = [f"{place}: {text.strip()}" for place, text in lines if re.search(pattern, text)]
    assert not found, f"write: {BANNED[pattern]}\n" + "\n".join(found)


def test_no_banned_words_in_names() -> None:
    in_a_name = re.compile(rf"(?<![^\W_])({'|'.join(BANNED_IN_NAMES)})(?![^\W_])")  # to parse all files takes seconds
    files = [(file, source) for file, source in sources() if in_a_name.search(source)]
    names = {(file.relative_to(ROOT), name) for file, source in files for name in find_names(ast.parse(source))}
    found = sorted(f"{place}: {name}" for place, name in names if BANNED_IN_NAMES & set(name.strip("_").split("_")))
    assert not found, "\n".join(found)


def find_names(tree: ast.AST) -> set[str]:
    """Return the names in a tree: what its nodes have as text and is no constant."""
    found = set[str]()
    for node in ast.walk(tree):
        for value in vars(node).values() if not isinstance(node, ast.Constant) else ():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str):
                    found.update(each.split("."))
    return found


def test_functions_are_not_named_of() -> None:
    pattern = re.compile(r"^\s*def (\w+_of|of|of_\w+)\(", re.M)
    found = [f"{file.relative_to(ROOT)}: {name}" for file, source in sources() for name in pattern.findall(source)]
    assert not found, "a function is a verb:\n" + "\n".join(found)
