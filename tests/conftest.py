"""What all tests share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from shoal.comm.pool import Pool

# How long one example takes says how busy the machine is. Each run of the suite draws others; a test that needs more of
# them at once says how many.
settings.register_profile("shoal", deadline=None, max_examples=40)
settings.load_profile("shoal")

# The models of tests are so small that a second thread mostly waits, on a core that the ranks need.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks on the CPU: ``pool.run(function, ranks, *args)``. Workers start when first needed."""
    with Pool(8) as pool:
        yield pool
