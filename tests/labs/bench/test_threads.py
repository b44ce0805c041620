"""The baseline of threads does the work of one process."""

import pytest

from shoal.labs.bench.step.torch_baselines import plain, threaded
from shoal.labs.bench.step.workload import Workload


@pytest.mark.parametrize("replicas", [1, 3])
def test_threads_compute_what_one_process_computes(replicas: int) -> None:
    """Losses after the first depend on the gradients of those before."""
    workload = Workload("tiny", sequence_length=16, sequences=6)
    threads, alone = threaded(workload, 0, 1, replicas=replicas), plain(workload, 0, 1)
    for number in range(4):
        assert threads(number) == pytest.approx(alone(number), rel=1e-4)
