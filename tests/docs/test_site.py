"""The documentation as a site: it builds without a broken link, and loads nothing from another host."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs.pages import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_site_builds_strictly_fetches_nothing_and_is_searched_as_files(page, tmp_path) -> None:
    """Every page is in the navigation; every link and every anchor exists."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    for file in tmp_path.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link|source)[^>]+(?:src|href)="(https?:)?//', file.read_text())
        assert not fetched, file
    pipelines = (tmp_path / "course" / "10-pipelines.html").read_text()
    assert '<a href="../panels.html#timeline?schedule=zb-v"><code>shoal lab' in pipelines
    parallel = re.sub(r' style="[^"]*"', "", (tmp_path / "course" / "05-data-parallelism.html").read_text())
    assert "T<sub>comm</sub> = 8 D F / W<sub>link</sub>" in parallel
    assert '"saved":true' in (tmp_path / "panels.html").read_text()
    assert (tmp_path / "course" / "index.html").exists() and (tmp_path / "search" / "search_index.json").exists()
    page.goto((tmp_path / "course" / "07-zero.html").as_uri())
    page.keyboard.press("s")
    page.keyboard.type("ring attention")
    page.wait_for_selector(".md-search-result__item:has-text('Context parallelism')")
