"""A process with a fake CUDA device: one for all tests of a process, since it imports for three seconds."""

from collections.abc import Callable, Iterator

import pytest

from tests.fake_cuda.library import start_process, why_unavailable


@pytest.fixture(scope="session")
def on_fake_cuda() -> Iterator[Callable]:
    """Return a callable that calls a function with arguments in a process with a fake CUDA device."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with start_process() as process:
        yield lambda function, *args: process.submit(function, *args).result(timeout=500)
