"""The course as data: its pages, their commands with expected lines, and the items of the lectures.

``python -m tests.docs.pages`` writes what is made from data: the table in docs/course/index.md, and glossary.md.
"""

import csv
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from shoal.labs.glossary.words import PAGES, page_file, read_words

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
LECTURES = {
    "A": "Scaling and parallelism", "X": "Parallel pretraining", "I": "Scaling systems for LLMs",
    "H": "Distributed data parallelism", "N": "Distributed data parallelism, front matter", "C": "Parallelism",
    "E": "Parallelism and mixtures of experts",
}  # fmt: skip
TABLE = "\n## By item of a lecture\n"


class Item(NamedTuple):
    """An item of a lecture: its page, what it is in a few words, and a command of the page that shows it."""

    item: str
    page: str
    about: str
    command: str


class Example(NamedTuple):
    """A command of a page with the lines that it must print, in this order."""

    command: str
    expected: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


class Page(NamedTuple):
    """A page of the course."""

    name: str
    text: str

    @property
    def examples(self) -> list[Example]:
        """Commands that a test runs: those in console blocks that do not begin with "# needs ..."."""
        found = []
        for block in self.blocks("console"):
            if not block.startswith("# needs "):
                for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                    command, *lines = part.replace("\\\n", " ").splitlines()
                    expected = tuple(" ".join(line.split()) for line in lines if line.strip() not in ("", "..."))
                    found.append(Example(" ".join(command.split()), expected))
        return found

    @property
    def items(self) -> list[str]:
        """Items that the last line names."""
        *_, last = self.text.strip().splitlines()
        return re.findall(r"[A-Z]\d+", last) if last.startswith("Items: ") else []

    def blocks(self, language: str) -> list[str]:
        """Return the texts of the fenced blocks in a language."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.M | re.S)


def read_pages() -> list[Page]:
    """Return the pages that exist, in order."""
    files = {page: COURSE / page_file(page) for page in PAGES}
    return [Page(page, file.read_text()) for page, file in files.items() if file.exists()]


def read_items() -> list[Item]:
    """Return the items of the lectures."""
    with (COURSE / "items.csv").open(newline="") as file:
        return [Item(**row) for row in csv.DictReader(file)]


def render_index() -> str:
    """Return index.md with the table of all items."""
    head = (COURSE / "index.md").read_text().partition(TABLE)[0]
    rows = ["", "| item | | page | command |", "|---|---|---|---|"]
    for lecture, title in LECTURES.items():
        rows.append(f"| **{lecture}** | **{title}** | | |")
        items = sorted((i for i in read_items() if i.item[0] == lecture), key=lambda i: int(i.item[1:]))
        rows += [f"| {i.item} | {i.about} | {link(i.page)} | {f'`{i.command}`' if i.command else ''} |" for i in items]
    return head + TABLE + "\n".join(rows) + "\n"


def render_glossary() -> str:
    """Return glossary.md."""
    lines = ["# Glossary", "", "Each word is also explained by `shoal explain WORD`.", ""]
    for word in read_words().values():
        also = f" ({', '.join(word.also)})" if word.also else ""
        lines += [f"**{word.name}**{also}: {word.about} {link(word.page)}, `{word.command}`", ""]
    return "\n".join(lines).rstrip() + "\n"


def link(page: str) -> str:
    """Return a link to a page, or its name while it does not exist."""
    return f"[{page}]({page_file(page)})" if (COURSE / page_file(page)).exists() else page


if __name__ == "__main__":
    (COURSE / "index.md").write_text(render_index())
    (COURSE / "glossary.md").write_text(render_glossary())
