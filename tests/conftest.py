"""What all tests share."""

from collections.abc import Iterator

import pytest

from shoal.comm.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks on the CPU: ``pool.run(function, ranks, *args)``. Workers start when first needed."""
    with Pool(8) as pool:
        yield pool
