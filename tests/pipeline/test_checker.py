"""The checker against an executor that knows nothing of it: what is accepted runs to its end and computes the step."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shoal.pipeline.checker import check_program
from shoal.pipeline.program import (
    BACKWARDS,
    FORWARDS,
    RECEIVES,
    SENDS,
    WEIGHTS,
    Action,
    Op,
    Program,
    ProgramError,
    build_program,
    find_receive,
    find_sends,
)
from shoal.pipeline.schedules import SCHEDULES

NAMES = st.sampled_from(sorted(SCHEDULES))
PROGRAMS = st.tuples(NAMES, st.integers(1, 6), st.integers(1, 10), st.integers(1, 3), st.integers(0, 3))


def program_of(size: tuple[str, int, int, int, int]) -> Program:
    name, p, m, virtual, zero = size
    assume(not SCHEDULES[name].refuses(p, m, SCHEDULES[name].virtual or virtual))
    return build_program(SCHEDULES[name], p, m, virtual_stages=virtual, zero=zero)


def execute(program: Program) -> dict[int, set[int]]:
    """What is in each stage's gradients when the optimizer steps; raises if a rank has to wait for ever.

    Numbers are sums of micro-batches' paths: a forward hands on which stages a micro-batch has been through, a
    backward which it has come back through. Messages are matched by their order alone, as process groups do.
    """
    places, office = [0] * program.ranks, {}  # and, for each way between two ranks, what is on it
    posted: dict[tuple, deque[Action]] = {}
    kept: dict[tuple, tuple] = {}  # what a rank has: results of its own and messages that have arrived
    reduced: set[int] = set()
    gradients: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
    stepped: dict[int, set[int]] = {}

    def channel(action: Action) -> tuple:
        up = action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
        ends = program.stage_rank[action.stage], program.stage_rank[action.stage + (1 if up else -1)]
        way = "F" if action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD) else "B"
        return (way, *(ends if action.op in SENDS else ends[::-1]))

    def fetch(rank: int, key: tuple) -> tuple | None:
        while key not in kept:
            ways = [w for w, receives in posted.items() if w[2] == rank and receives and office.get(w)]
            if not ways:
                return None
            for way in ways:
                receive = posted[way].popleft()
                kept["F" if way[0] == "F" else "B", receive.stage, receive.microbatch] = office[way].popleft()
        return kept[key]

    def run(rank: int, action: Action) -> bool:
        op, stage, m, *_ = action
        if op in FORWARDS:
            path = () if program.is_first(stage) else fetch(rank, ("F", stage, m))
            if path is None:
                return False
            assert path == tuple((s, m) for s in range(stage - stage % program.depth, stage))
            kept["done", stage, m] = path
            kept["F", stage + 1, m] = (*path, (stage, m))
        if op in BACKWARDS:
            path = () if program.is_last(stage) else fetch(rank, ("B", stage, m))
            if path is None:
                return False
            assert path == tuple((s, m) for s in range(stage - stage % program.depth + program.depth - 1, stage, -1))
            assert ("done", stage, m) in kept
            kept["B", stage - 1, m] = (*path, (stage, m))
            kept["input", stage, m] = path
        if op in WEIGHTS:
            assert ("input", stage, m) in kept and m not in gradients[stage]
            gradients[stage].add(m)
        if op in SENDS:
            way = "F" if op is Op.SEND_FORWARD else "B"
            office.setdefault(channel(action), deque()).append(kept[way, stage + (1 if way == "F" else -1), m])
        if op in RECEIVES:
            posted.setdefault(channel(action), deque()).append(action)
        if op is Op.REDUCE:
            reduced.add(stage)
            if not all(stage % program.depth + c * program.depth in reduced for c in range(program.model_copies)):
                return False
        if op is Op.STEP:
            for held in program.rank_stages(rank):
                assert held in reduced
                stepped[held] = set(gradients[held])
        return True

    moved = True
    while moved:
        moved = False
        for rank in reversed(range(program.ranks)):
            while places[rank] < len(program.actions[rank]) and run(rank, program.actions[rank][places[rank]]):
                places[rank] += 1
                moved = True
    assert places == [len(actions) for actions in program.actions], "a rank waits for ever"
    return stepped


@settings(deadline=None)
@given(PROGRAMS)
@example(("dualpipe", 6, 7, 1, 1))
def test_every_program_computes_the_step(size: tuple) -> None:
    program = program_of(size)
    check_program(program)
    stepped = execute(program)
    assert stepped == {stage: set(program.stage_microbatches(stage)) for stage in range(program.stages)}


@settings(deadline=None, max_examples=300)
@given(PROGRAMS, st.data())
def test_an_accepted_program_never_waits_for_ever(size: tuple, data: st.DataObject) -> None:
    """However it came about: a few of its actions were exchanged or moved."""
    program = program_of(size)
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, program.ranks - 1))
        actions = list(program.actions[rank])
        source, target = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        if data.draw(st.booleans()):
            actions.insert(target, actions.pop(source))
        else:
            actions[source], actions[target] = actions[target], actions[source]
        program = changed(program, rank, actions)
    try:
        check_program(program)
    except ProgramError:
        return
    assert execute(program) == {stage: set(program.stage_microbatches(stage)) for stage in range(program.stages)}


@settings(deadline=None)
@given(PROGRAMS, st.sampled_from(["removed", "doubled", "moved before its input"]), st.data())
def test_every_corrupted_program_is_refused(size: tuple, how: str, data: st.DataObject) -> None:
    program = program_of(size)
    rank = data.draw(st.integers(0, program.ranks - 1))
    actions = list(program.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    match how:
        case "removed":
            actions.pop(place)
        case "doubled":
            actions.insert(data.draw(st.integers(0, len(actions))), actions[place])
        case "moved before its input":
            inputs = [i for i in range(place) if is_input(actions[i], actions[place], program)]
            assume(inputs)
            actions.insert(data.draw(st.sampled_from(inputs)), actions.pop(place))
    with pytest.raises(ProgramError):
        check_program(changed(program, rank, actions))


def is_input(one: Action, other: Action, program: Program) -> bool:
    """Whether one action makes what another on the same rank needs."""
    if other.op is Op.REDUCE:
        return one.op in WEIGHTS and one.stage == other.stage
    if other.op in (Op.STEP, Op.GATHER):
        return (one.op, other.op) in ((Op.REDUCE, Op.STEP), (Op.STEP, Op.GATHER))
    if one == find_receive(other, program) or other in find_sends(one, program):
        return True
    if one.microbatch != other.microbatch or one.stage // program.depth != other.stage // program.depth:
        return False
    match other.op, other.stage - one.stage:
        case Op.FORWARD, 1:
            return one.op in FORWARDS
        case (Op.BACKWARD | Op.BACKWARD_INPUT), -1:
            return one.op in BACKWARDS
        case (Op.BACKWARD | Op.BACKWARD_INPUT), 0:
            return one.op in FORWARDS
        case Op.BACKWARD_WEIGHT, 0:
            return one.op in FORWARDS | BACKWARDS
    return False


def changed(program: Program, rank: int, actions: list[Action]) -> Program:
    return replace(program, actions=(*program.actions[:rank], tuple(actions), *program.actions[rank + 1 :]))
