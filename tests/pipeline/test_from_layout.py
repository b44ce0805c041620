"""From a layout to its schedule: what is refused before any process starts, and the forwards of a validation."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.from_layout import build_forwards, build_layout_program, check_run, check_schedule, virtual_stages
from shoal.pipeline.program import RECEIVES, SENDS, Action, Op, find_receive, matching_send
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.spec.catalog import model_shape
from shoal.spec.config import build_config
from shoal.spec.layout import Layout, ScheduleName

SHAPE = model_shape("tiny").model_copy(update={"layers": 8})


def test_a_layout_names_every_schedule() -> None:
    assert set(get_args(ScheduleName)) == set(EVERY)


@pytest.mark.parametrize(
    ("layout", "batch", "compile", "message"),
    [
        ({"pp": 2, "schedule": "zb-v", "virtual_stages": 3}, 4, False, "virtual_stages = 3, but zb-v has 2"),
        ({"pp": 3, "schedule": "interleaved-1f1b", "virtual_stages": 3}, 4, False, "8 layers cannot fill 9 stages"),
        ({"pp": 3, "schedule": "dualpipe"}, 6, False, "an even number of pipeline ranks"),
        ({"pp": 2, "schedule": "zb-h1"}, 4, True, "train.compile = true with parallel.schedule = 'zb-h1'"),
        ({"pp": 2, "schedule": "file:nowhere.csv"}, 4, False, "nowhere.csv"),
    ],
)
def test_what_cannot_be_is_refused(layout, batch, compile, message) -> None:
    with pytest.raises(UsageError, match=message):
        check_run(build_config({"parallel": layout, "train": {"global_batch": batch, "compile": compile}}), SHAPE)


def test_the_nearest_batch_is_named_and_fits() -> None:
    with pytest.raises(UsageError, match=r"Nearest train\.global_batch that fits") as refused:
        check_schedule(Layout(pp=4, schedule="dualpipe", dp=2, micro_batch=3), SHAPE, 6 * 1)
    for batch in str(refused.value).rsplit(": ", 1)[1].rstrip(".").split(" or "):
        check_schedule(Layout(pp=4, schedule="dualpipe", dp=2, micro_batch=3), SHAPE, int(batch))


def test_two_stages_a_rank_where_nothing_is_said() -> None:
    assert virtual_stages(Layout(pp=2, schedule="interleaved-1f1b")) == 2
    assert virtual_stages(Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=4)) == 4
    assert virtual_stages(Layout(pp=2)) == 1


@given(name=st.sampled_from(sorted(SCHEDULES)), pp=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_a_validation_goes_forward_through_all_stages_and_never_waits_in_a_circle(name, pp, microbatches) -> None:
    layout = Layout(pp=pp, schedule=name)
    trained = next((m for m in range(1, 30) if not SCHEDULES[name].refuses(pp, m, virtual_stages(layout))), None)
    if trained is None:
        return
    program = build_forwards(build_layout_program(layout, trained), microbatches)
    queues = [list(actions) for actions in program.actions]
    done: set[Action] = set()
    while any(queues):
        ready = [queue for queue in queues if queue and _ready(queue[0], program, done)]
        assert ready, [str(queue[0]) for queue in queues if queue]
        for queue in ready:
            done.add(queue.pop(0))
    forwards = {action for action in done if action.op is Op.FORWARD}
    assert forwards == {
        Action(Op.FORWARD, stage, m) for stage in range(program.stages) for m in program.stage_microbatches(stage)
    }
    through = [len(program.stage_microbatches(copy * program.depth)) for copy in range(program.model_copies)]
    assert sum(through) == microbatches


def _ready(action: Action, program, done: set[Action]) -> bool:
    """Whether a rank can go on with an action: receives are only posted, sends never wait."""
    if action.op in SENDS | RECEIVES:
        return True
    needed = find_receive(action, program)
    if needed is not None:
        return needed in done and matching_send(needed) in done
    return program.is_first(action.stage) or action._replace(stage=action.stage - 1) in done


@pytest.mark.parametrize(
    ("sizes", "says"), [((3, 4), "2 stages with 7 layers"), ((4, 3, 1), "3 stages with 8"), ((8,), "1 stages with 8")]
)
def test_layers_of_stages_that_do_not_add_up_are_refused(sizes: tuple[int, ...], says: str) -> None:
    shape = model_shape("tiny").model_copy(update={"layers": 8})
    with pytest.raises(UsageError, match=rf"stage_layers = .*{says}.*\n.*4, 4"):
        check_schedule(Layout(pp=2, stage_layers=sizes), shape, 2)
