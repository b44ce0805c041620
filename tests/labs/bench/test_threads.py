"""The baseline of threads does the work of one process."""

import pytest

from shoal.labs.bench.step.threads import data_parallel
from shoal.labs.bench.step.torch_baselines import plain
from shoal.labs.bench.step.workload import Workload


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_threads_compute_what_one_process_computes(replicas: int) -> None:
    """Losses after the first depend on the gradients of those before."""
    workload = Workload("tiny", sequence_length=16, sequences=6)
    threads, alone = (build(workload, 0, 1) for build in (lambda *of: data_parallel(*of, replicas=replicas), plain))
    for number in range(4):
        assert threads(number) == pytest.approx(alone(number), rel=1e-4)
