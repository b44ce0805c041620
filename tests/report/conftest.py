"""The browser of the tests of pages."""

from tests.labs.interactive.conftest import browser, page, saved  # noqa: F401 -- fixtures
