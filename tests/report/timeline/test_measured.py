"""A recorded step against the simulation of the same program: what was simulated, recorded, predicts itself."""

import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shoal.pipeline.program import Op, Program, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate
from shoal.pipeline.simulator.columns import CODE, OPS, build_columns
from shoal.report.run import Comparison, op_table, rank_table
from shoal.report.timeline.measured import MeasuredStep
from shoal.report.timeline.terminal import show
from shoal.report.timeline.trace import events
from shoal.training.records.profile import Profile, RankProfile
from tests.report.charts import program


def recorded(
    plan: Program, times: ActionTimes | np.ndarray, links: MessageTimes, steps: int = 1, dp: int = 1
) -> Profile:
    """What a profiler would record of a simulated step, on every replica: transfers take no time of their own."""
    timeline = simulate(plan, times, links, dp=dp)
    ranks = []
    for rank, actions in enumerate(plan.actions):
        found = iter(timeline.intervals(rank))
        begin, arrived, end, now = [], [], [], 0.0
        for action in actions:
            one = next(found) if action.op in CODE else None
            begin.append(now)
            arrived.append(one.start if one else now)
            now = one.end if one else now
            end.append(now)
        for replica in range(dp):
            numbers = tuple(range(3, 3 + steps))
            kept = tuple([values] * steps for values in (begin, arrived, end))
            ranks.append(RankProfile(rank * dp + replica, rank, replica, 0, actions, numbers, *kept))
    return Profile(plan, "", tuple(ranks))


@given(
    st.sampled_from(list(SCHEDULES)), st.integers(0, 3), st.integers(1, 3), st.integers(1, 2),
    st.integers(0, 2**32 - 1), st.floats(0.0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_a_recorded_simulation_predicts_itself(name, zero, steps, dp, seed, latency):
    plan = program(name, zero=zero)
    random = np.random.default_rng(seed)
    by_stage = {op.name.lower(): random.uniform(0.5, 2.0, plan.stages) for op in OPS if op is not Op.STEP}
    profile = recorded(plan, ActionTimes(**by_stage, step=0.3), MessageTimes(latency=latency), steps, dp)
    compared = Comparison.simulate(MeasuredStep.from_profile(profile))
    measured, predicted = compared.measured, compared.charts[0].timeline
    for op, stage, count, median, mean, longest in measured.by_op():
        wanted = by_stage[op.name.lower()][stage] if op is not Op.STEP else 0.3
        assert (median, mean, longest) == pytest.approx((wanted,) * 3)
        assert count == steps * dp * sum(a.op is op and a.stage == stage for rank in plan.actions for a in rank)
    assert np.all(measured.links().latency <= latency + 1e-9)
    if latency == 0:
        assert compared.difference == pytest.approx(0.0, abs=1e-9)
    else:  # a link whose messages nobody waited for counts as free
        assert -0.05 <= compared.difference <= 1e-9
    assert predicted.bubble == pytest.approx(compared.charts[1].timeline.bubble, abs=0.05)
    assert all(waiting >= 0 and busy > 0 for _, busy, waiting in measured.by_rank())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_slow_message_is_seen(name):
    profile = recorded(program(name), ActionTimes(), MessageTimes(latency=0.25))
    compared = Comparison.simulate(MeasuredStep.from_profile(profile))
    latency = compared.measured.links().latency
    assert latency[0, 1] == pytest.approx(0.25) and latency[1, 0] == pytest.approx(0.25)
    assert compared.difference == pytest.approx(0.0, abs=1e-9)


@given(st.sampled_from(list(SCHEDULES)), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_step_played_with_its_own_times_ends_where_it_did(name, seed):
    plan = program(name)
    op = build_columns(plan).op
    times = np.where(op == CODE[Op.STEP], 0.5, np.random.default_rng(seed).uniform(0.1, 3.0, len(op)))
    assert MeasuredStep.from_profile(recorded(plan, times, MessageTimes())).replayed == pytest.approx(0.0, abs=1e-9)


def test_the_mean_of_the_steps_is_what_is_predicted():
    plan = program("1f1b")
    quick, slow = (recorded(plan, ActionTimes(backward=time), MessageTimes()) for time in (2.0, 6.0))
    ranks = tuple(
        RankProfile(q.rank, q.pp, q.dp, q.tp, q.actions, (0, 1), *(
            [*getattr(q, field), *getattr(s, field)] for field in ("begin", "arrived", "end")
        ))
        for q, s in zip(quick.ranks, slow.ranks, strict=True)
    )
    compared = Comparison.simulate(MeasuredStep.from_profile(Profile(plan, "", ranks)))
    wanted = simulate(plan, ActionTimes(backward=4.0)).step_time
    assert compared.charts[0].timeline.step_time == pytest.approx(wanted)
    assert compared.measured.step_time == pytest.approx(wanted)


def test_the_tables_have_every_stage_and_every_rank():
    measured = MeasuredStep.from_profile(recorded(program("zb-v"), ActionTimes(step=1.0), MessageTimes(), dp=2))
    actions = [(row[0], row[1]) for row in op_table(measured)[1:]]
    assert actions.count(("forward", "3")) == 1 and ("optimizer", "–") in actions
    assert len(actions) == len(set(actions)) == 4 * 8 + 1  # F, I, W and R of 8 stages, and the optimizer
    assert [row[0] for row in rank_table(measured)[1:]] == list(map(str, range(8)))
    assert len(rank_table(measured, 3)) == 4


@pytest.mark.parametrize(("dp", "lane"), [(1, "rank"), (2, "pp")])
def test_lanes_of_several_replicas_are_places_in_the_pipeline(dp: int, lane: str) -> None:
    """Rank 1 of the table is another replica's first stage, and no lane of the timeline above it."""
    profile = recorded(program("1f1b"), ActionTimes(), MessageTimes(), dp=dp)
    compared = Comparison.simulate(MeasuredStep.from_profile(profile))
    assert {chart.lane for chart in compared.charts} == {lane}
    said = io.StringIO()
    show(Console(file=said, width=120), compared.charts)
    assert re.findall(r"^(\w+) 1 ", said.getvalue(), re.M) == [lane] * 2
    assert f"{lane} 3" in json.dumps([*events(compared.charts)])


def test_a_pair_is_one_computation() -> None:
    """A forward and a backward that take turns are recorded, and shown, for as long as both take."""
    found = {}
    for paired in (False, True):
        plan = build_program(SCHEDULES["dualpipev"], 2, 6, paired=paired)
        found[paired] = MeasuredStep.from_profile(recorded(plan, ActionTimes(), MessageTimes())).timeline(0)
    assert len(found[False].pairs) == 0 < len(pairs := found[True].pairs)
    for times in (found[True].start, found[True].end):
        assert np.array_equal(times[:, pairs], times[:, pairs + 1])
