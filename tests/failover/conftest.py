"""The corpus and the small runs of `tests.train`."""

from tests.train.conftest import corpus  # noqa: F401 -- fixtures
