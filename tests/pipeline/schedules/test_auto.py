"""The automatic scheduler: within the memory, never worse than the published orders, and the same every time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.checker import check_program
from shoal.pipeline.program import Op, Program, Schedule, StageDurations, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.placement import looped

TIMES = st.builds(StageDurations, *[st.floats(0.2, 3)] * 3, st.floats(0, 1))


def program_of(orders: list, m: int) -> Program:
    return build_program(Schedule("", "", lambda *_: orders, looped), len(orders), m)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 12), TIMES, st.integers(1, 18))
def test_every_order_is_whole_and_within_the_memory(p: int, m: int, times: StageDurations, memory: int) -> None:
    orders = zb_auto(p, m, times, memory)
    assert max(check_program(program_of(orders, m)).peak_live) <= memory
    assert zb_auto(p, m, times, memory) == orders


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 16), TIMES, st.data())
def test_no_published_order_that_fits_is_shorter(p: int, m: int, times: StageDurations, data: st.DataObject) -> None:
    memory = data.draw(st.integers(p, 2 * p))
    ours = check_program(program_of(zb_auto(p, m, times, memory), m), times)
    for name, needs in (("1f1b", p), ("zb-h1", p), ("zb-h2", 2 * p - 1)):
        if memory >= needs:
            assert ours.bubble <= check_program(build_program(SCHEDULES[name], p, m), times).bubble + 1e-9


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(0, 7), st.integers(0, 8))
def test_every_activation_more_takes_a_pass_off_the_bubble(p: int, extra: int, more: int) -> None:
    """Qi et al. 2024, figure 3: from ZB-H1's (p-1) with p activations to ZB-H2's 0 with 2p-1."""
    memory, m = p + min(extra, p - 1), 2 * p - 1 + more
    result = check_program(program_of(zb_auto(p, m, memory=memory), m))
    assert result.bubble == pytest.approx((2 * p - 1 - memory) / (3 * m + 2 * p - 1 - memory))


@settings(max_examples=12)
@given(st.integers(2, 6), st.integers(4, 12))
def test_with_less_memory_than_1f1b_it_runs_longer_but_runs(p: int, m: int) -> None:
    bubbles = [check_program(program_of(zb_auto(p, m, memory=memory), m)).bubble for memory in (1, p)]
    assert bubbles[0] == pytest.approx(1 - 3 * m / (m * (2 * p + 1))) and bubbles[1] < bubbles[0]


def test_halves_that_are_free_to_move_fill_the_gaps_of_slow_messages() -> None:
    times = StageDurations(communication=0.5)
    auto, h1 = (check_program(program, times).bubble for program in (
        program_of(zb_auto(4, 16, times, 7), 16), build_program(SCHEDULES["zb-h1"], 4, 16)
    ))
    assert auto < h1
    assert {a.op for a in zb_auto(4, 16, times, 7)[0]} == {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}


def test_memory_that_holds_not_one_micro_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="each pipeline rank needs memory for one"):
        zb_auto(3, 4, memory=0)
