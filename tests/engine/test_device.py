"""Which device a rank gets."""

import pytest
import torch

from shoal.base.errors import UsageError
from shoal.engine.device import pick_device


@pytest.fixture
def see(monkeypatch):
    """Let torch see a number of CUDA devices."""

    def devices(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return devices


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_each_local_rank_has_a_device_of_its_own(see, choice):
    see(4)
    assert [pick_device(choice, rank).index for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="local rank 4 has no CUDA device: this machine has 4"):
        pick_device(choice, 4)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_the_one_device_that_a_bound_rank_sees_is_its_own(see, choice):
    see(1)
    assert [pick_device(choice, rank, bound=True).index for rank in range(4)] == [0, 0, 0, 0]
    with pytest.raises(UsageError, match="local rank 3"):
        pick_device(choice, 3)
    see(4)  # bound to none: all are there for all
    assert [pick_device(choice, rank, bound=True).index for rank in range(4)] == [0, 1, 2, 3]


def test_without_cuda_auto_is_the_cpu_and_cuda_is_refused(see):
    see(0)
    assert pick_device("auto", 7).type == "cpu"
    with pytest.raises(UsageError, match="torch sees no CUDA device here"):
        pick_device("cuda")
