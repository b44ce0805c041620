"""The engine: what is true of every program, whatever its times."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.checker import check_program
from shoal.pipeline.program import RECEIVES, SENDS, Action, Op, Program, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator import ActionTimes, Disturbance, MessageTimes, Timeline, simulate
from shoal.pipeline.simulator.columns import build_columns

NAMES = st.sampled_from(sorted(SCHEDULES))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any schedule, of a size that it allows."""
    schedule = SCHEDULES[draw(NAMES)]
    sizes = [
        (p, m, v)
        for p in range(1, 7)
        for m in range(1, 13)
        for v in ((schedule.virtual,) if schedule.virtual else (1, 2, 3))
        if not schedule.refuses(p, m, v)
    ]
    p, m, v = draw(st.sampled_from(sizes))
    return build_program(schedule, p, m, virtual_stages=v)


@st.composite
def plays(draw: st.DrawFn) -> tuple[Program, ActionTimes, MessageTimes]:
    """A program, times that differ for every stage and micro-batch, links that differ for every pair of ranks."""
    program = draw(programs())
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    shape = (program.stages, program.microbatches)
    times = ActionTimes(
        *(random.uniform(0.5, 2, shape) for _ in range(3)), step=random.uniform(0, 2, program.stages).max()
    )
    pairs = (program.ranks, program.ranks)
    slow = draw(st.sampled_from((0.0, 0.3, 3.0)))
    blocking = draw(st.booleans())
    return program, times, MessageTimes(*(slow * random.random(pairs) for _ in range(2)), blocking=blocking)


@settings(deadline=None)
@given(plays())
def test_work_is_conserved_and_a_rank_does_one_thing_at_a_time(play: tuple) -> None:
    program, times, links = play
    timeline = simulate(program, times, links)
    durations = times.per_row(build_columns(program))
    assert np.allclose(timeline.end - timeline.start, durations)
    computing = np.isin(timeline.columns.op, range(4))
    assert timeline.busy.sum() == pytest.approx(durations[computing].sum())
    assert np.allclose(timeline.busy + timeline.idle, timeline.compute_span)
    for rank in range(program.ranks):
        spans = [(start, end) for _, start, end in timeline.intervals(rank)]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


@settings(deadline=None)
@given(plays())
def test_nothing_begins_before_what_it_needs_has_arrived(play: tuple) -> None:
    program, times, links = play
    timeline = simulate(program, times, links)
    messages = timeline.messages
    made, left, there = timeline.end[0, messages.producer], messages.start[0], messages.end[0]
    assert np.all(made <= left + 1e-9) and np.all(there <= timeline.start[0, messages.consumer] + 1e-9)
    time, latency = links.between(messages.source, messages.target)
    assert np.allclose(there - left, time + latency)
    ends = {i.action[:1] + i.action[1:4]: i.end for rank in range(program.ranks) for i in timeline.intervals(rank)}
    backward = {key[1:]: end for key, end in ends.items() if key[0] in (Op.BACKWARD, Op.BACKWARD_INPUT)}
    for rank in range(program.ranks):
        for action, start, _ in timeline.intervals(rank):
            if action.op is Op.FORWARD and not program.is_first(action.stage):
                assert ends[Op.FORWARD, action.stage - 1, *action[2:4]] <= start + 1e-9
            if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                assert ends[Op.FORWARD, *action[1:4]] <= start + 1e-9
                if not program.is_last(action.stage):
                    assert backward[action.stage + 1, *action[2:4]] <= start + 1e-9


@settings(deadline=None)
@given(plays())
def test_messages_on_one_link_go_one_after_another(play: tuple) -> None:
    program, times, links = play
    messages = simulate(program, times, links).messages
    time, _ = links.between(messages.source, messages.target)
    for pair in set(zip(messages.source, messages.target, strict=True)):
        here = np.flatnonzero((messages.source == pair[0]) & (messages.target == pair[1]))
        start = messages.start[0, here]
        assert np.all(start[:-1] + time[here][:-1] <= start[1:] + 1e-9)


@settings(deadline=None)
@given(plays())
def test_the_step_is_as_long_as_its_critical_path_and_no_shorter_than_any_rank_or_micro_batch(play: tuple) -> None:
    program, times, links = play
    timeline = simulate(program, times, links)
    path = [interval for interval, _ in timeline.critical_path]
    assert path[0].start == 0 and path[-1].end == timeline.step_time
    assert all(before.end <= after.start + 1e-9 for before, after in pairwise(path))
    assert timeline.step_time >= timeline.busy.max() - 1e-9
    durations = times.per_row(timeline.columns)
    for m in range(program.microbatches):
        through = (timeline.columns.microbatch == m) & (timeline.columns.op < 3)
        assert timeline.step_time >= durations[through].sum() - 1e-9


@settings(deadline=None)
@given(plays(), st.floats(0.01, 5))
def test_a_slower_link_never_shortens_the_step(play: tuple, more: float) -> None:
    program, times, links = play
    before = simulate(program, times, links)
    latency = MessageTimes(links.time, links.latency + more, blocking=links.blocking)
    assert simulate(program, times, latency).step_time >= before.step_time - 1e-9
    if program.ranks > 1:
        slow = Disturbance(slow_links={(0, 1): 1 + more})
        assert simulate(program, times, links, disturbance=slow).step_time >= before.step_time - 1e-9


@settings(deadline=None)
@given(plays(), st.floats(1, 5), st.data())
def test_a_straggler_never_shortens_the_step_nor_costs_more_than_its_own_time(
    play: tuple, factor: float, data: st.DataObject
) -> None:
    program, times, links = play
    rank = data.draw(st.integers(0, program.ranks - 1))
    before = simulate(program, times, links)
    after = simulate(program, times, links, disturbance=Disturbance({rank: factor}))
    own = (times.per_row(before.columns) * (before.columns.rank == rank)).sum()
    assert before.step_time - 1e-9 <= after.step_time <= before.step_time + (factor - 1) * own + 1e-9


def test_a_blocking_link_holds_its_sender() -> None:
    program = build_program(SCHEDULES["gpipe"], 2, 3)
    overlapped = simulate(program, ActionTimes(), MessageTimes(time=1.0))
    held = simulate(program, ActionTimes(), MessageTimes(time=1.0, blocking=True))
    starts = [[i.start for i in timeline.intervals(0)][:3] for timeline in (overlapped, held)]
    assert starts == [[0, 1, 2], [0, 2, 4]]


# ---- replicas ----------------------------------------------------------------------------------------------------


def test_replicas_that_do_not_differ_are_played_once() -> None:
    program = build_program(SCHEDULES["1f1b"], 4, 8)
    alone, many = simulate(program), simulate(program, dp=64, tp=16)
    assert many.replicas.tolist() == [64] and many.step_time == alone.step_time and many.bubble == alone.bubble
    slow = simulate(program, dp=64, tp=16, disturbance=Disturbance({5: 1.5, 17: 1.5, 32: 2.0}))
    assert slow.replicas.tolist() == [61, 2, 1]  # 5 and 17 are of the same stage in two replicas
    slow = simulate(program, dp=10**12, disturbance=Disturbance({5: 1.5}))
    assert slow.replicas.tolist() == [10**12 - 1, 1]


@settings(deadline=None, max_examples=30)
@given(programs(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_replicas_meet_at_the_reduction(program: Program, dp: int, tp: int, data: st.DataObject) -> None:
    """Each ends as late as the slowest, and a straggler in one of them costs what it would cost alone."""
    rank = data.draw(st.integers(0, program.ranks * dp * tp - 1))
    times = ActionTimes(reduce=0.5, step=0.25)
    many = simulate(program, times, disturbance=Disturbance({rank: 3.0}), dp=dp, tp=tp)
    alone = simulate(program, times, disturbance=Disturbance({rank // (dp * tp): 3.0}))
    assert many.step_time == pytest.approx(alone.step_time)
    for reduction in np.flatnonzero(many.columns.op == 4):
        assert np.ptp(many.start[:, reduction]) < 1e-9


def test_jitter_is_different_for_every_replica_and_the_same_for_every_run() -> None:
    program = build_program(SCHEDULES["1f1b"], 4, 8)
    first, again, other = (
        simulate(program, dp=8, disturbance=Disturbance(jitter=0.1, seed=seed)) for seed in (1, 1, 2)
    )
    assert first.replicas.tolist() == [1] * 8
    assert np.array_equal(first.end, again.end) and not np.array_equal(first.end, other.end)
    computing = first.columns.op < 4
    noise = (first.end - first.start)[:, computing]
    assert len(np.unique(noise)) == noise.size
    assert noise.mean() == pytest.approx(np.where(first.columns.op[computing] == 1, 2, 1).mean(), rel=0.02)


# ---- refusals ----------------------------------------------------------------------------------------------------


def of_orders(*orders: list[Action]) -> Program:
    return Program(tuple(map(tuple, orders)), tuple(range(len(orders))), 2)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    first = [Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 1)]
    second = [Action(Op.FORWARD, 1, 0), Action(Op.FORWARD, 1, 1), Action(Op.BACKWARD, 1, 0), Action(Op.BACKWARD, 1, 1)]
    with pytest.raises(UsageError, match="deadlock: pipeline rank 0 waits at 0B0; pipeline rank 1 waits at 1F1"):
        simulate(of_orders(first, second))


def test_a_result_that_nobody_makes_or_two_make_is_named() -> None:
    with pytest.raises(UsageError, match="1F0 waits for stage 0, which never computes it"):
        simulate(of_orders([Action(Op.FORWARD, 0, 1)], [Action(Op.FORWARD, 1, 0)]))
    with pytest.raises(UsageError, match="0F0 is computed more than once"):
        simulate(of_orders([Action(Op.FORWARD, 0, 0)] * 2, []))


def test_what_cannot_be_is_refused_with_what_can() -> None:
    program = build_program(SCHEDULES["gpipe"], 2, 2)
    with pytest.raises(UsageError, match=r"straggler 2: the world has ranks 0 to 1 \(pp 2 x dp 1 x tp 1\)"):
        simulate(program, disturbance=Disturbance({2: 2.0}))
    with pytest.raises(UsageError, match="rank 0 meets 4"):
        simulate(program, dp=2, tp=2, disturbance=Disturbance(slow_links={(0, 1): 2.0}))
    with pytest.raises(UsageError, match=r"times.forward: given for \(3,\)"):
        simulate(program, ActionTimes(forward=np.ones(3)))
    with pytest.raises(UsageError, match="must be finite and not negative"):
        ActionTimes(forward=-1.0)
    with pytest.raises(UsageError, match="2 is twice as slow"):
        Disturbance({0: 0.0})
    with pytest.raises(UsageError, match=r"--dp 1000000000: a step with more than .* is not simulated"):
        simulate(program, dp=10**9, disturbance=Disturbance(jitter=0.1))


@pytest.mark.parametrize(("actions", "stages"), [((), ()), ((), (0,)), (((),), ())])
def test_a_program_of_nothing_is_refused(actions: tuple, stages: tuple) -> None:
    with pytest.raises(UsageError, match=r"no actions, or no stages\.\n  Give `actions` for at least one rank"):
        check_program(Program(actions, stages, 1))


def test_ranks_without_an_action_are_not_simulated() -> None:
    with pytest.raises(UsageError, match=r"no rank has an action\.\n  Give `actions`"):
        simulate(Program(((), ()), (0, 1), 1))


def test_the_timeline_holds_what_the_program_says() -> None:
    program = build_program(SCHEDULES["1f1b"], 3, 4)
    timeline: Timeline = simulate(program)
    for rank, actions in enumerate(program.actions):
        wanted = [action for action in actions if action.op not in SENDS | RECEIVES]
        assert [interval.action for interval in timeline.intervals(rank)] == wanted
