"""The peak rate of all ranks, of which one on each machine answers."""

from unittest import mock

import pytest
import torch.distributed as dist

from shoal.launch.worker_pool import Pool
from shoal.training.step import engine
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


def summed(local: list[int], peaks: list[float | None]) -> tuple[float | None, int]:
    """The sum that a rank gets, and how often it measured; lists of the ranks of its machine and its peak, by rank."""
    rank = dist.get_rank()
    with mock.patch.object(engine, "peak_flops", return_value=peaks[rank]) as measured:
        return engine_of(small_run({"dp": 4})).sum_peak_flops(local[rank]), measured.call_count


@pytest.mark.parametrize(("local", "answer"), [
    ([4, 4, 4, 4], [0]), ([2, 2, 2, 2], [0, 2]), ([1, 1, 1, 1], [0, 1, 2, 3]), ([3, 3, 3, 1], [0, 3]),
    ([1, 3, 3, 3], [0, 3]),
])  # fmt: skip
def test_one_rank_of_each_machine_answers_for_all_of_them(pool: Pool, local: list[int], answer: list[int]) -> None:
    peaks = [5.0 if ranks == 1 else 3.0 for ranks in local]
    found = pool.run(summed, 4, local, peaks)
    assert [rate for rate, _ in found] == [sum(peaks)] * 4
    assert [rank for rank, (_, measured) in enumerate(found) if measured] == answer


def test_a_machine_whose_peak_is_unknown_makes_the_sum_unknown(pool: Pool) -> None:
    assert [rate for rate, _ in pool.run(summed, 4, [2] * 4, [3.0, 3.0, None, None])] == [None] * 4
