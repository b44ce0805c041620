"""The lab's server, and its panels in a browser."""

from collections.abc import Iterator

import pytest

from shoal.labs.interactive.page import build_page
from shoal.report.server import PageServer


@pytest.fixture(scope="session")
def lab() -> Iterator[PageServer]:
    """The lab, served from a thread."""
    with PageServer(build_page()) as server:
        yield server


@pytest.fixture
def panel(page, lab):
    """Open a panel of the lab in a state, as in the URL after the #, and wait for its first picture."""

    def open_panel(state: str, ready: str) -> object:
        page.goto(f"{lab.url}#{state}")
        page.wait_for_selector(ready)
        return page

    return open_panel
