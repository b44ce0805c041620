"""What tests of trained models share."""

import pytest


class Kept:
    """The tests' own pool, which stays open."""

    def __init__(self, pool):
        self.run = pool.run

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def kept(pool, monkeypatch):
    """Use the tests' pool for the ranks of a layout."""
    monkeypatch.setattr("shoal.launch.inference.Pool", lambda *_, **__: Kept(pool))
