"""The player: as a slow player of plain numbers finds it, and many sets of durations at once as each alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pipeline.program import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Program,
    build_program,
    find_receive,
    matching_send,
)
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate
from shoal.pipeline.simulator.player import Player
from shoal.spec.schedules import PAIRED


def step_time(program: Program, lasting: dict[Op, float], time: float, latency: float) -> float:
    """Seconds of a step, by going over all actions and messages until none of them ends later."""
    found: dict[Action, float] = {}

    def passes(action: Action) -> Action:  # without what tells halves and versions apart
        backward = action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        return Action(Op.BACKWARD_INPUT if backward else action.op, *action[1:4])

    while True:
        before, last = dict(found), 0.0
        for actions in program.actions:
            now, free = 0.0, [0.0] * program.ranks
            for action in actions:
                if action.op in SENDS:
                    target = program.stage_rank[action.stage + (1 if action.op is Op.SEND_FORWARD else -1)]
                    free[target] = max(free[target], now) + time
                    found[action] = free[target] + latency
                elif action.op not in RECEIVES:
                    receive = find_receive(action, program) if action.op in COMPUTE else None
                    begin = max(now, found.get(matching_send(receive), 0.0)) if receive else now
                    if action.op is Op.REDUCE and program.model_copies == 2:  # which waits for the copy's
                        other = (action.stage + program.depth) % program.stages
                        begin = max(begin, found.get(Action(Op.RECV_FORWARD, other), 0.0))
                        found[Action(Op.RECV_FORWARD, action.stage)] = now
                    now = found[passes(action)] = begin + lasting[action.op]
            last = max(last, now)
        if found == before:
            return last


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_slow_player_of_plain_numbers_finds_the_same(data: st.DataObject) -> None:
    ranks, microbatches, virtual = (data.draw(st.integers(1, most)) for most in (5, 9, 3))
    schedule = EVERY[data.draw(st.sampled_from(
        [n for n, s in EVERY.items() if not s.refuses(ranks, microbatches, s.virtual or virtual)]
    ))]
    program = build_program(schedule, ranks, microbatches, virtual_stages=virtual)
    forward, inputs, weights, reduce, step, time, latency = (data.draw(st.floats(0.0, 3.0)) for _ in range(7))
    lasting = dict(zip(
        (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.REDUCE, Op.STEP),
        (forward, inputs + weights, inputs, weights, reduce, step), strict=True,
    ))
    timeline = simulate(
        program, ActionTimes(forward, inputs, weights, reduce=reduce, step=step), MessageTimes(time, latency)
    )
    assert timeline.step_time == pytest.approx(step_time(program, lasting, time, latency), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_set_ends_when_it_does_alone(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    virtual, gathers = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    allowed = [n for n, s in SCHEDULES.items() if not s.refuses(ranks, microbatches, virtual)]
    pairs = [n for n in allowed if n in PAIRED]
    name = data.draw(st.sampled_from(pairs if pairs and data.draw(st.booleans()) else allowed))
    program = build_program(
        SCHEDULES[name], ranks, microbatches, virtual_stages=virtual, zero=int(gathers), transfers=False
    )
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    times = random.uniform(0, 2, (7, program.stages, 3))
    times[4] = random.uniform(0, 2, 3)  # the optimizer's is of a rank
    links = [MessageTimes(*random.uniform(0, 1, 2)) for _ in range(3)]
    paired = name in PAIRED and data.draw(st.booleans())
    alone = [
        simulate(
            program,
            ActionTimes(
                *times[:3, :, i], pair=times[6, :, i] if paired else None, reduce=times[3, :, i], step=times[4, 0, i],
                gather=times[5, :, i],
            ),
            links[i],
        )
        for i in range(3)
    ]
    together = Player(program, paired=paired).step_times(times, links)
    assert together == pytest.approx([one.step_time for one in alone], rel=1e-12)
