"""Each schedule costs what its paper says: idle time and activations, with passes that all take 1."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.pipeline.checker import Check, check_program
from shoal.pipeline.program import COMPUTE, StageDurations, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.file import load_csv
from tests.pipeline.schedules import torch_schedules

RANKS = st.integers(1, 8)


def cost(name: str, p: int, m: int, virtual: int = 2) -> tuple[float, Check]:
    """A rank's idle time, in passes of one stage; and the rest."""
    schedule = SCHEDULES[name]
    result = check_program(build_program(schedule, p, m, virtual_stages=virtual))
    busy = 3 * m * (schedule.virtual or virtual) / schedule.model_copies
    return busy / (1 - result.bubble) - busy, result


@given(RANKS, st.integers(1, 24))
def test_naive_has_one_micro_batch_in_flight(p: int, m: int) -> None:
    idle, result = cost("naive", p, m)
    assert idle == pytest.approx(3 * m * (p - 1))
    assert result.peak_live == (1,) * p


@settings(max_examples=20)
@given(RANKS, st.integers(1, 24))
def test_gpipe_and_1f1b_differ_in_memory_alone(p: int, m: int) -> None:
    """Narayanan et al. 2021, section 2.2: bubble (p-1)/m of the work."""
    for name, alive in (("gpipe", [m] * p), ("1f1b", [min(p - rank, m) for rank in range(p)])):
        _, result = cost(name, p, m)
        assert result.bubble == result.flushed_bubble == pytest.approx((p - 1) / (m + p - 1))
        assert list(result.peak_live) == alive


@settings(max_examples=20)
@given(RANKS, st.integers(1, 3), st.integers(1, 4))
def test_stages_in_turn_divide_the_bubble(p: int, rounds: int, v: int) -> None:
    """Narayanan et al. 2021, section 2.2.2; Lamy-Poirier 2023, section 4.1: 1/v of it."""
    m = rounds * p
    for name in ("looped-bfs", "interleaved-1f1b"):
        _, result = cost(name, p, m, v)
        assert result.bubble == result.flushed_bubble == pytest.approx((p - 1) / (v * m + p - 1))
        if name == "looped-bfs":
            assert result.peak_live == (v * m,) * p
        else:
            ahead = [p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p)]
            assert list(result.peak_live) == [min(alive, v * m) for alive in ahead]


@settings(max_examples=20)
@given(RANKS, st.integers(0, 24), st.integers(1, 4))
def test_no_number_of_micro_batches_makes_the_bubble_of_stages_in_turn_larger(p: int, more: int, v: int) -> None:
    """Rounds of p or a few micro-batches more: for those, as many activations more on each but one of the stages."""
    m = p + more
    first = -(-m // (m // p))
    idle, result = cost("interleaved-1f1b", p, m, v)
    assert idle == pytest.approx(3 * (p - 1))
    if v > 1:
        assert max(result.peak_live) <= 2 * (p - 1) + (v - 1) * first + 1
    idle, result = cost("interleaved-zb", p, m, v)
    assert idle == pytest.approx(p - 1)
    assert max(result.peak_live) <= p + (v - 1) * first


@settings(max_examples=20)
@given(RANKS, st.integers(1, 16), st.integers(1, 4))
def test_zero_bubble_h1_has_a_third_of_the_bubble_with_the_same_memory(p: int, more: int, v: int) -> None:
    """Qi et al. 2024, table 2: (p-1)(T_F + T_B - T_W); with v stages a rank, v times as many activations as stages."""
    idle, result = cost("zb-h1", p, p + more)
    assert idle == pytest.approx(p - 1)
    assert result.peak_live == (p,) * p
    assert result.flushed_bubble == pytest.approx(result.bubble)
    idle, result = cost("interleaved-zb", p, p * (1 + more % 3), v)
    assert idle == pytest.approx(p - 1)
    assert result.peak_live == (v * p,) * p


@given(RANKS, st.integers(0, 16))
def test_zero_bubble_h2_has_none_with_nearly_twice_the_memory(p: int, more: int) -> None:
    """Qi et al. 2024, table 2: (p-1)(T_F + T_B - 2 T_W) = 0; (2p-1) activations."""
    idle, result = cost("zb-h2", p, 2 * p - 1 + more)
    assert idle == pytest.approx(0)
    assert result.peak_live == (2 * p - 1,) * p


@given(RANKS, st.integers(0, 16))
def test_zero_bubble_v_has_none_with_the_memory_of_1f1b(p: int, more: int) -> None:
    """Qi et al. 2024, section 6: its stages are half of 1F1B's, so 2p of them are 1F1B's p."""
    idle, result = cost("zb-v", p, 2 * p - 1 + more)
    assert idle == pytest.approx(0)
    assert result.peak_live == (2 * p,) * p


@given(st.integers(1, 4), st.integers(0, 16))
def test_dualpipe_is_dualpipe_v_on_twice_the_ranks(half: int, more: int) -> None:
    """DeepSeek-AI 2024, table 2: PP + 1 activations for PP parts of the model.

    The table's bubble, (PP/2 - 1)(F&B + B - 3W), counts a forward and a backward that are computed at once as one, of
    which neither's result is there before its end. One after the other they leave half as much.
    """
    for name, p, m in (("dualpipe", 2 * half, 4 * half + 2 * more), ("dualpipev", half, 2 * half + more)):
        idle, result = cost(name, p, m)
        assert idle == pytest.approx(half - 1)
        assert result.peak_live == (2 * half + 1,) * p


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 9, 16])
def test_v_half_and_v_min_keep_a_half_and_a_third(p: int) -> None:
    """Qi et al. 2024b, table 1, of 1F1B's 2p (in these stages) and of its bubble of 6(p-1); and what the turns add."""
    m = 2 * p
    idle, result = cost("v-min", p, m)
    assert max(result.peak_live) <= 2 * p / 3 + 3
    assert idle <= 6 * (p - 1) * 2 / 3 + 1.5
    idle, result = cost("v-half", p, m)
    assert max(result.peak_live) <= p + 2
    assert idle <= 6 * (p - 1) / 2


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", sorted(torch_schedules.NAMES))
def test_no_more_bubble_than_torchs(name: str, p: int) -> None:
    for m in (2 * p, 4 * p):
        torchs = torch_schedules.of_torch(name, p, m).pipeline_order
        rows = [",".join(str(a) for a in torchs[rank] if a is not None) for rank in range(p)]
        theirs, ours = (
            check_program(load_csv("\n".join(rows))),
            check_program(build_program(SCHEDULES[name], p, m, virtual_stages=2)),
        )
        assert ours.bubble <= theirs.bubble + 1e-12
        assert max(ours.peak_live) <= max(theirs.peak_live)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), RANKS, st.integers(1, 24), st.integers(1, 4))
def test_one_ranks_order_alone_is_its_part_of_all(name: str, p: int, m: int, v: int) -> None:
    schedule = SCHEDULES[name]
    assume(schedule.order and not schedule.refuses(p, m, schedule.virtual or v))
    virtual = schedule.virtual or v
    orders = schedule.orders(p, m, virtual)
    assert [schedule.order(rank, p, m, virtual) for rank in range(p)] == orders
    assert all(action.op in COMPUTE for order in orders for action in order)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 6), st.integers(2, 8), st.floats(0, 3))
def test_messages_that_take_time_never_make_a_step_shorter(name: str, p: int, m: int, communication: float) -> None:
    schedule = SCHEDULES[name]
    assume(not schedule.refuses(p, m, schedule.virtual or 2))
    program = build_program(schedule, p, m, virtual_stages=2)
    slow = check_program(program, StageDurations(communication=communication))
    assert slow.flushed_bubble >= check_program(program).flushed_bubble - 1e-12
