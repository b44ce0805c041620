"""Short programs are played as `shoal.pipeline.simulator` plays them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.program import Action, Op, Program, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.short import before_backwards, is_short, play
from shoal.pipeline.simulator import ActionTimes, MessageTimes, columns, simulate

SECONDS = st.floats(0.0, 3.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_short_program_is_played_as_in_arrays(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from([s for s in SCHEDULES.values() if s.copies == 1 and s.name != "zb-auto"]))
    ranks, groups, virtual = (data.draw(st.integers(1, most)) for most in (4, 3, 3))
    fields = {"virtual_stages": virtual, "zero": data.draw(st.integers(0, 3))}
    written, program = (
        build_program(schedule, ranks, groups * ranks, **fields, transfers=sent) for sent in (True, False)
    )
    rows = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=program.stages, max_size=program.stages)
    passes, finishing = data.draw(rows), data.draw(rows)
    time, latency = data.draw(SECONDS), data.draw(SECONDS)
    reduce, update, gather = np.array(finishing).T
    step = max(update[program.stages_of(rank)].sum() for rank in range(ranks))
    forward, inputs, weights = np.array(passes).T
    timeline = simulate(written, ActionTimes(forward, inputs, weights, reduce=reduce, step=step, gather=gather),
                        MessageTimes(time, latency))  # fmt: skip
    found = play(program, passes, finishing, time, latency)
    assert is_short(program) and (ranks == 1 or not is_short(written))
    assert found.seconds == pytest.approx(timeline.step_time, rel=1e-12)
    assert found.busy == pytest.approx(timeline.busy[0].tolist(), rel=1e-9)
    alive = [list(of) for of in zip(*before_backwards(program, inputs, weights, time), strict=True)]
    expected = columns.before_backwards(timeline.columns, inputs, weights, time)
    assert np.array(alive) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_is_not_short_is_not_taken() -> None:
    assert not is_short(build_program(SCHEDULES["dualpipe"], 2, 4))
    assert not is_short(build_program(SCHEDULES["terapipe"], 2, 4, parts=2))
    assert not is_short(build_program(SCHEDULES["gpipe"], 2, 2000))


def test_ranks_that_wait_for_each_other_are_found() -> None:
    stuck = Program(((Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 0)), (Action(Op.FORWARD, 1, 0),)), (0, 1), 1)
    with pytest.raises(UsageError, match="deadlock"):
        play(stuck, [(1, 1, 1)] * 2, [(0, 0, 0)] * 2)
