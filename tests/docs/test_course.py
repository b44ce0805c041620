"""The course: every command prints what its page states, every item of the lectures has a page and a command."""

import contextlib
import doctest
import os
import re
import tempfile
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.labs.glossary.words import PAGES, page_file, read_words
from tests.docs import pages as course
from tests.docs.pages import COURSE, LECTURES, ROOT, Example, Page, read_items, read_pages
from tests.docs.site_hooks import panel_states
from tests.trainings.runs import shoal

ITEMS, EXISTING = 221, read_pages()
WRITTEN = [pytest.param(page, id=page.name) for page in EXISTING]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run: it has the examples, and keeps what they write."""
    path = tmp_path_factory.mktemp("course")
    (path / "examples").symlink_to(ROOT / "examples")
    with contextlib.chdir(path), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        yield path


@cache
def run(command: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    program, *words = Example(command, ()).words
    assert program == "shoal", command
    if words[0] == "train":  # as a fork, whose ranks are forks of it: none imports torch
        return shoal(*words, cwd=Path.cwd())
    with tempfile.TemporaryFile("w+") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        kept = [os.dup(stream) for stream in (1, 2)]  # ranks write to the process's own streams
        try:
            for stream in (1, 2):
                os.dup2(out.fileno(), stream)
            code = main(words)
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
        out.seek(0)
        return code, out.read()


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_print_what_the_page_states(page: Page, folder) -> None:
    assert any(example.expected for example in page.examples), "no command with an expected line"
    for command, expected in page.examples:
        code, printed = run(command)
        refused = any(line.startswith("shoal: error:") for line in expected)
        assert code == (2 if refused else 0), f"{command}\n{printed}"
        if command.startswith("shoal plan auto") and torch.__version__ < "2.12":
            continue  # its trace of the same layer has four operators more, which take 3 % of the time
        lines = iter([" ".join(line.split()) for line in printed.splitlines()])
        for line in expected:
            pattern = re.compile(".*".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", line)))
            assert any(pattern.fullmatch(got) for got in lines), f"$ {command}\nlacks, in this order: {line}\n{printed}"


@pytest.mark.parametrize("page", WRITTEN)
def test_python_examples(page: Page) -> None:
    names: dict[str, object] = {}
    for block in page.blocks("python"):
        test = doctest.DocTestParser().get_doctest(block, names, page.name, page_file(page.name), 0)
        assert test.examples, f"a python block without >>>:\n{block}"
        said: list[str] = []
        result = doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
        assert not result.failed, "".join(said)
        names.update(test.globs)


@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_has_all_its_parts(page: Page) -> None:
    """The idea, the formula, the picture, the commands, the exercise with its answer, the panel of the lab."""
    headings = re.findall(r"^## (.*)$", page.text, re.M)
    assert headings[0] == "Formula" and {"Try it", "Exercise", "In the lab"} <= {*headings}, headings
    assert "<details" in page.text.split("## Exercise")[1], "an exercise needs an answer"
    idea = page.text.split("\n## ")[0].split("\n", 1)[1]
    assert 7 <= len(re.findall(r"[.:!?](?=\s)", idea)) <= 18, "the idea in about ten sentences"
    assert page.blocks("text"), "a formula"
    assert panel_states(page.text.split("## In the lab")[1])
    pictures = re.findall(r"^!\[[^]]+\]\(([^)]+\.svg)\)\n\n?Drawn by `(shoal [^`]+)`", page.text, re.M)
    assert pictures, "a picture, and below it: Drawn by `shoal ...`"


@pytest.mark.parametrize("page", WRITTEN)
def test_pictures_show_what_their_commands_draw(page: Page, folder) -> None:
    """Compares the texts of a picture: its numbers and labels."""
    for command, _ in page.examples:
        for name in re.findall(r"--out (\S+\.svg)", command):
            run(command)
            drawn, kept = ("".join(ET.parse(root / name).getroot().itertext()).split() for root in (folder, COURSE))
            assert drawn == kept, f"docs/course/{name} is older than what `{command}` draws"


def test_every_item_has_one_page_and_a_command() -> None:
    items = read_items()
    assert len(items) == len({item.item for item in items}) == ITEMS
    assert {item.item[0] for item in items} == {*LECTURES} and {item.page for item in items} == {*PAGES}
    assert {page.name for page in EXISTING} == {*PAGES}
    for page in EXISTING:
        assert page.items == [item.item for item in items if item.page == page.name], page.name
        commands = [example.command for example in page.examples]
        for item in (item for item in items if item.page == page.name):
            assert item.about and item.command, item
            found = bool(page.blocks("python")) if item.command == "python" else begins(item.command, commands)
            assert found, f"{page.name} runs no command of {item}"


def test_every_word_has_a_page_and_a_command() -> None:
    commands = {page.name: [example.command for example in page.examples] for page in EXISTING}
    for word in read_words().values():
        assert word.page in PAGES and 2 <= len(re.findall(r"[.!?](?= |$)", word.about)) <= 3, word
        assert begins(word.command, commands[word.page]), word


def begins(start: str, commands: list[str]) -> bool:
    """Return whether a command begins with these words."""
    return any(f"{command} ".startswith(f"{start} ") for command in commands)


def test_tables_are_made_from_the_data() -> None:
    assert (COURSE / "index.md").read_text() == course.render_index(), "run: python -m tests.docs.pages"
    assert (COURSE / "glossary.md").read_text() == course.render_glossary(), "run: python -m tests.docs.pages"
