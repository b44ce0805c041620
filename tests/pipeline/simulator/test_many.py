"""Many sets of durations played at once end when each does alone, and ranks are as busy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate
from shoal.pipeline.simulator.columns import of_schedule
from shoal.pipeline.simulator.many import Replay


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_set_ends_when_it_does_alone(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    virtual, gathers = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    name = data.draw(st.sampled_from([n for n, s in SCHEDULES.items() if not s.refuses(ranks, microbatches, virtual)]))
    columns = of_schedule(SCHEDULES[name], ranks, microbatches, virtual, gathers=gathers)
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    times = random.uniform(0, 2, (6, columns.program.stages, 3))
    times[4] = random.uniform(0, 2, 3)  # the optimizer's is of a rank
    links = [MessageTimes(*random.uniform(0, 1, 2)) for _ in range(3)]
    alone = [
        simulate(
            columns,
            ActionTimes(*times[:3, :, i], reduce=times[3, :, i], step=times[4, 0, i], gather=times[5, :, i]),
            links[i],
        )
        for i in range(3)
    ]
    together = Replay(columns)
    assert together.step_times(times, links) == pytest.approx([one.step_time for one in alone], rel=1e-12)
    assert pytest.approx(np.array([one.busy[0] for one in alone]), rel=1e-12) == together.busy(times).T
