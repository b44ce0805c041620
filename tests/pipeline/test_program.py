"""Schedules, the checker that proves them, and the split of layers over stages."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.pipeline.checker import check_program
from shoal.pipeline.partition import stage_layers
from shoal.pipeline.program import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Program,
    ProgramError,
    add_transfers,
    build_program,
    find_receive,
)
from shoal.pipeline.schedules import SCHEDULES

STAGES, MICROBATCHES, VIRTUAL = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)
NAMES = st.sampled_from(sorted(SCHEDULES))


def program_of(name: str, p: int, m: int, virtual: int = 2, zero: int = 0) -> Program:
    """The program of a schedule, for the nearest sizes that it can be built for."""
    schedule = SCHEDULES[name]
    assume(not schedule.refuses(p, m, schedule.virtual or virtual))
    return build_program(schedule, p, m, virtual_stages=virtual, zero=zero)


@given(NAMES, STAGES, MICROBATCHES, VIRTUAL, st.integers(0, 3))
def test_every_schedule_is_proved_for_every_size(name: str, p: int, m: int, virtual: int, zero: int) -> None:
    check_program(program_of(name, p, m, virtual, zero))


@given(NAMES, STAGES, MICROBATCHES, st.integers(0, 3))
def test_the_optimizer_steps_once_and_last(name: str, p: int, m: int, zero: int) -> None:
    program = program_of(name, p, m, zero=zero)
    for rank, actions in enumerate(program.actions):
        ends = [Op.REDUCE] * len(program.rank_stages(rank)) + [Op.STEP]
        if zero in (1, 2):
            ends += [Op.GATHER] * len(program.rank_stages(rank))
        assert [a.op for a in actions[-len(ends) :]] == ends


@given(NAMES, STAGES, MICROBATCHES)
def test_what_is_received_was_asked_for_one_computation_early(name: str, p: int, m: int) -> None:
    """Or sooner, where another message from the same rank overtakes it."""
    program = program_of(name, p, m)
    for actions in program.actions:
        computed = 0
        posted: dict[Action, int] = {}
        for action in actions:
            if action.op in RECEIVES:
                posted[action] = computed
            elif action.op in COMPUTE:
                receive = find_receive(action, program)
                assert receive is None or posted[receive] <= max(0, computed - 1)
                computed += 1


# ---- defects -------------------------------------------------------------------------------------------------------


def changed(program: Program, rank: int, actions: list[Action]) -> Program:
    return replace(
        program, actions=(*program.actions[:rank], tuple(actions), *program.actions[rank + 1 :])
    )


@given(NAMES, st.integers(2, 5), st.integers(2, 6), st.data())
def test_an_action_that_is_missing_is_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    program = build_program(SCHEDULES[name], p, m, zero=data.draw(st.integers(0, 3)))
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    with pytest.raises(ProgramError):
        check_program(changed(program, rank, actions))


@given(NAMES, st.integers(2, 5), st.integers(2, 6), st.data())
def test_an_action_that_is_there_twice_is_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    program = build_program(SCHEDULES[name], p, m, zero=data.draw(st.integers(0, 3)))
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    i = data.draw(st.integers(0, len(actions) - 1))
    with pytest.raises(ProgramError):
        check_program(changed(program, rank, [*actions[: i + 1], *actions[i:]]))


@given(NAMES, st.integers(2, 5), st.integers(2, 6), st.data())
def test_messages_in_another_order_than_expected_are_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    program = program_of(name, p, m)
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    ways: dict[tuple[Op, int], list[int]] = {}  # places of the sends to one rank in one direction
    for i, a in enumerate(actions):
        if a.op in SENDS:
            ways.setdefault((a.op, program.stage_rank[a.stage + (1 if a.op is Op.SEND_FORWARD else -1)]), []).append(i)
    first, second = data.draw(st.sampled_from([places[:2] for places in ways.values() if len(places) > 1] or [(0, 0)]))
    assume(first != second)
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(ProgramError, match=r"messages of (FOR|BACK)WARD|deadlock|comes before"):
        check_program(changed(program, rank, actions))


def test_a_deadlock_is_told_with_who_waits_where() -> None:
    """Stage 1 wants a forward's result before stage 0, which waits for a gradient first, can send it."""
    first = [Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 1)]
    second = [Action(Op.FORWARD, 1, 0), Action(Op.FORWARD, 1, 1), Action(Op.BACKWARD, 1, 0), Action(Op.BACKWARD, 1, 1)]
    orders = add_transfers(Program((tuple(first), tuple(second)), (0, 1), 2)).actions
    actions = [[*order, Action(Op.REDUCE, stage), Action(Op.STEP)] for stage, order in enumerate(orders)]
    with pytest.raises(ProgramError, match="deadlock: pipeline rank 0 waits at 0B0; pipeline rank 1 waits at 1F1"):
        check_program(Program(tuple(map(tuple, actions)), (0, 1), 2))


@given(NAMES, st.integers(1, 4), st.integers(1, 5), st.data())
def test_what_follows_the_last_backward_is_noticed_in_any_other_order(
    name: str, p: int, m: int, data: st.DataObject
) -> None:
    """REDUCE, STEP, GATHER: the only order in which the weights are those of the whole batch, on every rank."""
    program = program_of(name, p, m, zero=data.draw(st.integers(0, 3)))
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    after = [i for i, a in enumerate(actions) if a.op in (Op.REDUCE, Op.STEP, Op.GATHER)]
    moved = data.draw(st.sampled_from(after))
    last = max(i for i, a in enumerate(actions) if a.op in COMPUTE and actions[moved].stage in (a.stage, -1))
    sooner = [i for i in (last, *after) if i < moved and actions[i].op is not actions[moved].op]
    earlier = data.draw(st.sampled_from(sooner))
    actions.insert(earlier, actions.pop(moved))
    with pytest.raises(ProgramError, match="comes before"):
        check_program(changed(program, rank, actions))


@given(NAMES, STAGES, MICROBATCHES, st.integers(0, 3))
def test_parameters_are_gathered_where_zero_keeps_them_whole_and_nowhere_else(
    name: str, p: int, m: int, zero: int
) -> None:
    program = build_program(SCHEDULES[name], p, m, zero=zero)
    with pytest.raises(ProgramError, match=r"0G (is missing|does not belong here)"):
        check_program(replace(program, gathers=not program.gathers))


def test_an_optimizer_that_steps_before_the_last_backward_is_noticed() -> None:
    program = build_program(SCHEDULES["gpipe"], 1, 2)
    finish = [Action(Op.REDUCE, 0), Action(Op.STEP)]
    actions = [a for a in program.actions[0] if a not in finish]
    with pytest.raises(ProgramError, match="0R comes before 0B1"):
        check_program(changed(program, 0, [*actions[:3], *finish, *actions[3:]]))


def test_a_backward_before_its_forward_is_noticed() -> None:
    program = build_program(SCHEDULES["gpipe"], 1, 1)
    forward, backward, *rest = program.actions[0]
    with pytest.raises(ProgramError, match="0B0 comes before 0F0"):
        check_program(changed(program, 0, [backward, forward, *rest]))


# ---- layers --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 130), st.integers(1, 40))
def test_no_layer_is_ever_lost(layers: int, stages: int) -> None:
    assume(stages <= layers)
    parts = stage_layers(layers, stages)
    assert len(parts) == stages
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the last stage also has the head


@given(st.integers(1, 130), st.integers(2, 40), st.floats(0, 20))
def test_no_other_split_has_a_faster_slowest_stage(layers: int, stages: int, head: float) -> None:
    assume(stages <= layers)
    parts = stage_layers(layers, stages, head)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert min(len(part) for part in parts) >= 1
    slowest = max(max(len(part) for part in parts[:-1]), len(parts[-1]) + head)
    best = min(max(-(-(layers - last) // (stages - 1)), last + head) for last in range(1, layers - stages + 2))
    assert slowest == best
