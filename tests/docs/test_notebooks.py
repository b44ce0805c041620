"""The course's notebooks: their code runs from top to bottom, and they are kept without outputs."""

import json
from pathlib import Path

import pytest

from tests.docs.pages import COURSE, read_pages

NOTEBOOKS = sorted(COURSE.glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells), "clear its outputs"
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{file.name}, {cell['id']}", "exec"), names)


def test_a_page_links_to_each_notebook() -> None:
    text = "".join(page.text for page in read_pages())
    assert len(NOTEBOOKS) >= 3 and all(f"]({file.name})" in text for file in NOTEBOOKS)
