"""A real Chromium, driven by Playwright: one for all tests of a process, which cannot drive two."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """The session's browser."""
    if CHROMIUM is None:
        pytest.skip("pages are tested in a browser: no chromium, chromium-browser or google-chrome on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are tested by playwright, which is missing")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=root)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def window(browser) -> object:
    """A page for all tests of a process: a new one would take two seconds of each."""
    return browser.new_page()


@pytest.fixture
def page(window) -> Iterator[object]:
    """An empty page, 1200 pixels wide. No script may fail on it, and nothing may be printed to its console."""
    problems: list[str] = []
    watched = {
        "pageerror": lambda error: problems.append(str(error)),
        "console": lambda said: problems.append(f"{said.type}: {said.text}"),
        "requestfailed": lambda request: problems.append(f"failed: {request.url}"),
    }
    window.set_viewport_size({"width": 1200, "height": 900})
    window.emulate_media(color_scheme="light")
    window.set_default_timeout(30_000)
    for event, note in watched.items():
        window.on(event, note)
    yield window
    for event, note in watched.items():
        window.remove_listener(event, note)
    window.unroute_all()
    window.context.set_offline(False)
    window.goto("about:blank")
    assert not [problem for problem in problems if "status of 400" not in problem]  # a refusal, which the page shows


@pytest.fixture
def saved(page, tmp_path: Path):
    """Open a page of this content from a file, without a network."""

    def open_file(html: str, ready: str, state: str = "") -> object:
        file = tmp_path / "saved.html"
        file.write_text(html)
        page.context.set_offline(True)
        page.goto(f"{file.as_uri()}{state}")
        page.wait_for_selector(ready)
        return page

    return open_file


def check_widths(page) -> None:
    """Check that a page is as wide as its window: of a phone, a tablet and a desk."""
    for width in (390, 900, 1500):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
