"""Sizes of relaxed data parallelism: what is saved, validated or averaged is something that the replicas have."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.spec.compatibility.sizes import check_relaxed_sizes
from shoal.spec.config import RunConfig
from shoal.spec.layout import Sync
from shoal.spec.sync_methods import LOCAL, UNSYNCHRONISED


def accepts(sync: str, dp: int = 2, **sections: dict[str, int]) -> bool:
    try:
        check_relaxed_sizes(RunConfig().replace(parallel={"sync": sync, "dp": dp}, **sections))
    except UsageError:
        return False
    return True


@given(
    st.sampled_from(get_args(Sync)), st.integers(1, 6), st.integers(0, 12), st.integers(0, 12), st.integers(1, 12)
)
def test_local_steps_divide_what_needs_the_average(sync, steps, validate, save, log):
    """Losses are exchanged then too: a log covers whole averages, or an average whole logs."""
    fits = not validate % steps and not save % steps and (not log % steps or not steps % log)
    found = accepts(
        sync, relaxed={"local_steps": steps}, train={"validate_every": validate}, checkpoint={"every": save},
        metrics={"log_every": log},
    )  # fmt: skip
    assert found == (fits or sync not in LOCAL)


@given(st.sampled_from(get_args(Sync)), st.sampled_from((1, 2, 3, 6, 64, 65)), st.integers(1, 9))
def test_replicas_that_wait_for_nobody_are_bits_of_a_number_and_groups_are_of_pairs(sync, dp, group):
    few = sync not in UNSYNCHRONISED or dp <= 64
    paired = sync != "wagma" or group % 2 == 0 or group >= dp
    sections = {"train": {"validate_every": 10}, "relaxed": {"group": group}}
    assert accepts(sync, dp, **sections) == (few and paired)
