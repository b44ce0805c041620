"""PipeDream and 2BW: which weights each pass uses, how many versions are kept, and what the checker refuses."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.pipeline.checker import check_program
from shoal.pipeline.program import COMPUTE, Action, Op, Program, ProgramError, build_program
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.pipeline.schedules.asynchronous import pipedream_2bw, update_groups
from shoal.pipeline.schedules.placement import looped, per_rank_schedule
from shoal.spec.schedules import ASYNCHRONOUS

STAGES, MICROBATCHES, ZERO = st.integers(1, 8), st.integers(1, 24), st.integers(0, 3)
NAMES = st.sampled_from(sorted(ASYNCHRONOUS))


def program_of(name: str, p: int, m: int, zero: int = 0, every: int = 0) -> Program:
    schedule = EVERY[name]
    if every:
        schedule = per_rank_schedule(name, "", partial(pipedream_2bw, every=every), looped)
    return build_program(schedule, p, m, zero=zero)


def versions(program: Program, op: Op) -> dict[tuple[int, int], int]:
    return {(a.stage, a.microbatch): a.version for actions in program.actions for a in actions if a.op is op}


@given(NAMES, STAGES, MICROBATCHES, ZERO, st.booleans())
def test_every_size_is_proved(name: str, p: int, m: int, zero: int, tied: bool) -> None:
    program = program_of(name, p, m, zero)
    check_program(program, tied=tied)
    for rank, actions in enumerate(program.actions):
        passes = [a._replace(version=-1) for a in actions if a.op in COMPUTE]
        assert passes == SCHEDULES["1f1b"].orders(p, m, 1)[rank]


@given(STAGES, st.integers(2, 24))
def test_pipedream_is_as_stale_as_its_formula_and_keeps_a_version_for_each_one_in_flight(p: int, m: int) -> None:
    program = program_of("pipedream", p, m)
    for (stage, microbatch), version in versions(program, Op.FORWARD).items():
        assert version == max(0, microbatch - (p - stage - 1))
    assert program.updates == m
    ahead = [p - stage - 1 for stage in range(p)]
    assert list(check_program(program).peak_versions) == [
        1 + min(w, max(1, m - w)) for w in ahead
    ]  # p - stage where m >= 2 w


@given(STAGES, MICROBATCHES, st.integers(0, 8))
def test_2bw_is_one_update_behind_on_every_stage_and_keeps_two_versions(p: int, m: int, more: int) -> None:
    every = p + more
    program = program_of("pipedream-2bw", p, m, every=every)
    groups = update_groups(m, every)
    assert program.updates == len(groups) == max(1, m // every)
    assert [m for group in groups for m in group] == list(range(m))
    if len(groups) == 1:
        assert program == build_program(SCHEDULES["1f1b"], p, m)
        return
    for (_, microbatch), version in versions(program, Op.FORWARD).items():
        assert version == max(0, program.update_by_microbatch[microbatch] - 1)
    assert set(check_program(program).peak_versions) == {2}


@given(NAMES, STAGES)
def test_a_single_update_is_1f1b(name: str, p: int) -> None:
    assert program_of(name, p, 1, zero=1) == build_program(SCHEDULES["1f1b"], p, 1, zero=1)


@given(NAMES, STAGES, st.integers(2, 24), ZERO)
def test_each_version_is_reduced_made_and_gathered_in_turn(name: str, p: int, m: int, zero: int) -> None:
    program = program_of(name, p, m, zero)
    assume(program.updates > 1)
    ends = [Op.REDUCE, Op.STEP] + [Op.GATHER] * (zero in (1, 2))
    for stage, actions in enumerate(program.actions):
        updates = [a for a in actions if a.op in (Op.REDUCE, Op.STEP, Op.GATHER)]
        assert updates == [Action(op, stage, version=v + 1) for v in range(program.updates) for op in ends]
        assert actions[-1] == updates[-1]


def changed(program: Program, rank: int, actions: list[Action]) -> Program:
    return replace(program, actions=(*program.actions[:rank], tuple(actions), *program.actions[rank + 1 :]))


@given(NAMES, st.integers(1, 5), st.integers(3, 12), st.data())
def test_a_pass_with_another_version_is_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    """A forward with newer weights than there are; a backward with others than its forward's; one without a name."""
    program = program_of(name, p, m)
    assume(program.updates > 1)
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    i = data.draw(st.sampled_from([i for i, a in enumerate(actions) if a.op in COMPUTE]))
    backwards = [a for a in actions if a.op is Op.BACKWARD and a.microbatch == actions[i].microbatch]
    assert len(backwards) == 1
    other = data.draw(st.integers(-1, program.updates).filter(lambda version: version != actions[i].version))
    actions[i] = actions[i]._replace(version=other)
    with pytest.raises(ProgramError, match=r"comes before|goes back through another|names no version"):
        check_program(changed(program, rank, actions))


@given(NAMES, st.integers(1, 5), st.integers(2, 12), ZERO, st.data())
def test_an_update_that_is_moved_is_noticed(name: str, p: int, m: int, zero: int, data: st.DataObject) -> None:
    """Past any backward, or past another part of an update."""
    program = program_of(name, p, m, zero)
    assume(program.updates > 1)
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    parts = [i for i, a in enumerate(actions) if a.op in (Op.BACKWARD, Op.REDUCE, Op.STEP, Op.GATHER)]
    i = data.draw(st.integers(0, len(parts) - 2))
    assume(Op.BACKWARD not in (actions[parts[i]].op,) or actions[parts[i + 1]].op is not Op.BACKWARD)
    actions.insert(parts[i + 1], actions.pop(parts[i]))
    with pytest.raises(ProgramError):
        check_program(changed(program, rank, actions))


@given(NAMES, st.integers(1, 5), st.integers(2, 12), st.data())
def test_an_update_that_is_missing_or_there_twice_is_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    program = program_of(name, p, m, zero=1)
    assume(program.updates > 1)
    rank = data.draw(st.integers(0, p - 1))
    actions = list(program.actions[rank])
    i = data.draw(st.sampled_from([i for i, a in enumerate(actions) if a.op in (Op.REDUCE, Op.STEP, Op.GATHER)]))
    with pytest.raises(ProgramError, match="is missing"):
        check_program(changed(program, rank, actions[:i] + actions[i + 1 :]))
    with pytest.raises(ProgramError, match=r"occurs 2 times|comes before"):
        check_program(changed(program, rank, actions[: i + 1] + actions[i:]))


def test_stages_that_update_after_other_micro_batches_are_noticed() -> None:
    """Each would divide by the tokens of other micro-batches."""
    threes, fours = (program_of("pipedream-2bw", 2, 8, every=every) for every in (3, 4))
    assert threes.updates == fours.updates == 2
    with pytest.raises(ProgramError, match="1B3@0 adds to the gradient of version 1, which on the first"):
        check_program(changed(threes, 1, list(fours.actions[1])))
    with pytest.raises(ProgramError, match="1R@1 comes before 1B3"):
        check_program(changed(fours, 1, list(threes.actions[1])))


def test_a_synchronous_program_names_no_version() -> None:
    program = build_program(SCHEDULES["1f1b"], 2, 2)
    actions = [a._replace(version=0) if a.op in COMPUTE else a for a in program.actions[0]]
    with pytest.raises(ProgramError, match="0F0@0 names a version"):
        check_program(changed(program, 0, actions))
