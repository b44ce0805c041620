"""What a timeline says of memory, weight versions, slices of the sequence and pairs computed at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pipeline.checker import check_program
from shoal.pipeline.program import Action, Op, Program, build_program
from shoal.pipeline.program import StageDurations as Unit
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.pipeline.simulator import ActionTimes, Timeline, simulate
from shoal.pipeline.simulator.compare import compare_schedules

F, B, S = Op.FORWARD, Op.BACKWARD, Op.STEP


@settings(deadline=None)
@given(st.sampled_from(sorted(EVERY)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_the_check_is_that_of_the_timeline(name: str, p: int, m: int, v: int) -> None:
    schedule = EVERY[name]
    virtual = schedule.virtual or v
    if schedule.refuses(p, m, virtual):
        return
    program = build_program(schedule, p, m, virtual_stages=virtual)
    checked = check_program(program, Unit(1.0, 1.5, 0.5, 0.0))
    timeline = simulate(program, ActionTimes(1.0, 1.5, 0.5))
    assert timeline.bubble == pytest.approx(checked.flushed_bubble)
    assert timeline.bubble_of_slowest_rank == pytest.approx(checked.bubble)
    assert timeline.peak_live.tolist() == list(checked.peak_live)
    program = build_program(schedule, p, m, virtual_stages=virtual, transfers=False)
    unsent = simulate(program, ActionTimes(1.0, 1.5, 0.5))
    assert np.array_equal(unsent.end, timeline.end) and np.array_equal(unsent.columns.op, timeline.columns.op)


def test_slices_of_a_sequence_take_and_keep_their_share() -> None:
    whole, cut = (simulate(build_program(SCHEDULES["gpipe"], 4, 2, sequence_slices=n)) for n in (1, 4))
    assert np.allclose(cut.busy, whole.busy)
    assert cut.peak_live.tolist() == whole.peak_live.tolist() == [2.0] * 4
    assert whole.bubble == pytest.approx(3 / (2 + 3)) and cut.bubble == pytest.approx(3 / (8 + 3))  # eight shorter ones


def test_a_late_send_is_waited_for() -> None:
    """What is played is the program: its result leaves where the program sends it, not where it is made."""
    early = build_program(SCHEDULES["gpipe"], 2, 2)
    actions = list(early.actions[0])
    send = actions.index(Action(Op.SEND_FORWARD, 0, 0))
    actions.insert(actions.index(Action(F, 0, 1)), actions.pop(send))  # behind the next forward
    late = Program((tuple(actions), early.actions[1]), early.stage_rank, 2)
    assert [next(simulate(p).intervals(1)).start for p in (early, late)] == [1.0, 2.0]


# ---- versions of the weights ---------------------------------------------------------------------------------------


def stage_of(*actions: Action) -> Timeline:
    return simulate(Program((actions,), (0,), 4))


def test_weights_have_one_version_where_they_are_updated_once() -> None:
    assert simulate(build_program(SCHEDULES["1f1b"], 4, 8)).weight_versions.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_asynchronous_schedules_keep_as_many_versions_as_their_papers_say(p: int) -> None:
    """PipeDream one for each micro-batch in flight (Narayanan et al. 2019, section 3.3), 2BW two (2021b, 3.1)."""
    stashing, double = (
        simulate(build_program(EVERY[name], p, 4 * p)) for name in ("pipedream", "pipedream-2bw")
    )
    assert stashing.weight_versions.tolist() == list(range(p, 0, -1))
    assert double.weight_versions.tolist() == [2] * p


def test_versions_are_kept_from_the_step_that_makes_them_to_their_last_use() -> None:
    forwards = [Action(F, 0, m, version=0) for m in range(3)]
    backwards = [a for m in range(3) for a in (Action(B, 0, m, version=0), Action(S, 0, version=m + 1))]
    assert stage_of(*forwards, *backwards).weight_versions.tolist() == [2]  # version 0, and the newest beside it
    stashed = [
        *forwards[:2], Action(B, 0, 0, version=0), Action(S, 0, version=1), Action(F, 0, 2, version=1),
        Action(B, 0, 1, version=0), Action(S, 0, version=2), Action(F, 0, 3, version=2),
        Action(B, 0, 2, version=1), Action(S, 0, version=3), Action(B, 0, 3, version=2), Action(S, 0, version=4),
    ]  # fmt: skip
    assert stage_of(*stashed).weight_versions.tolist() == [2]
    fresh = [a for m in range(3) for a in (Action(F, 0, m, version=m), Action(B, 0, m, version=m), Action(S, 0, -1))]
    assert stage_of(*fresh).weight_versions.tolist() == [1]


# ---- pairs ---------------------------------------------------------------------------------------------------------


def test_a_pair_begins_and_ends_as_one_and_counts_once() -> None:
    program = build_program(SCHEDULES["dualpipe"], 4, 16)
    timeline = simulate(program, ActionTimes(pair=2.5))
    columns = timeline.columns
    assert len(timeline.pairs) > 0
    for row in timeline.pairs:
        assert columns.op[row] == 0 and columns.op[row + 1] == 1
        assert timeline.start[0, row] == timeline.start[0, row + 1]
        assert timeline.end[0, row] == timeline.end[0, row + 1] == timeline.start[0, row] + 2.5
    alone = simulate(program, ActionTimes())
    pairs = np.bincount(columns.rank[timeline.pairs], minlength=4)
    assert np.allclose(alone.busy[0] - timeline.busy[0], 0.5 * pairs)
    sent = {int(row): t for row, t in zip(timeline.messages.producer, timeline.messages.start[0], strict=True)}
    assert all(sent[row] >= timeline.end[0, row] for row in map(int, timeline.pairs) if row in sent)


def test_a_forward_and_a_backward_of_one_stage_are_no_pair() -> None:
    assert len(simulate(build_program(SCHEDULES["1f1b"], 4, 16), ActionTimes(pair=2.5)).pairs) == 0


def test_slices_are_of_terapipe_alone_beside_others() -> None:
    sliced, other = compare_schedules(["terapipe", "gpipe"], pp=4, microbatches=4, slices=4)
    (plain,) = compare_schedules("gpipe", pp=4, microbatches=4)
    (cut,) = compare_schedules(["gpipe"], pp=4, microbatches=4, slices=4)
    assert other.timeline.step_time == plain.timeline.step_time > cut.timeline.step_time
    assert sliced.timeline.step_time == cut.timeline.step_time
