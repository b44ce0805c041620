"""Proof that a program is complete, ordered and free of deadlock, with its memory and idle time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from shoal.pipeline.program import (
    BACKWARDS,
    FORWARDS,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Program,
    ProgramError,
    StageDurations,
    find_receive,
    find_sends,
    matching_send,
)
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

# What each computation completes: a full backward completes both halves.
HALVES = {
    Op.FORWARD: (Op.FORWARD,),
    Op.BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
    Op.BACKWARD_INPUT: (Op.BACKWARD_INPUT,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
}


@dataclass(frozen=True)
class Check:
    """Memory and idle time of a checked program with given times, taken from its `Timeline`.

    Attributes:
        peak_live: for each pipeline rank, the most activations alive together, in activations of one stage for one
            micro-batch. An activation is alive from its forward until its weight gradients are done. Memory that the
            first half of a split backward could free (Qi et al. 2024, table 1: M_B - M_W) is not subtracted.
        bubble: idle share of a rank's time from its first to its last computation, for the rank with the longest such
            time. It is the cost of a step if ranks need not synchronise at its end (Qi et al. 2024, section 5.1), and
            equals `flushed_bubble` for schedules without a split backward.
        flushed_bubble: idle share of the step over all ranks, from the first to the last computation on any rank. It is
            the cost of a step if all ranks synchronise at its end, as for a global gradient norm.
        peak_versions: for each pipeline rank, the most versions of its weights kept together.
    """

    peak_live: tuple[float, ...]
    bubble: float
    flushed_bubble: float
    peak_versions: tuple[int, ...]


def check_program(program: Program, times: StageDurations | None = None, *, tied: bool = False) -> Check:
    """Prove a program correct, and simulate it.

    Args:
        times: times of the passes (default: a forward and each half of a backward take 1, transfers 0).
        tied: see `shoal.pipeline.simulator.player.Player`.

    Raises:
        ProgramError: an action is missing, repeated, on the wrong rank or before its inputs; a message has no
            counterpart or arrives out of order; or the ranks deadlock.

    >>> from shoal.pipeline.program import build_program
    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> found = check_program(build_program(SCHEDULES["1f1b"], ranks=4, microbatches=8))
    >>> found.peak_live, round(found.bubble, 3)
    ((4.0, 3.0, 2.0, 1.0), 0.273)
    """
    for rank in range(program.ranks):
        _check_rank(program, rank)
        _check_versions(program, rank)
    _check_messages(program)
    forward, backward_input, backward_weight, message = times or StageDurations()
    durations = ActionTimes(forward, backward_input, backward_weight)
    timeline = simulate(program, durations, MessageTimes(latency=message), tied=tied)
    return Check(
        peak_live=tuple(timeline.peak_live.tolist()),
        bubble=timeline.bubble_of_slowest_rank,
        flushed_bubble=timeline.bubble,
        peak_versions=tuple(timeline.weight_versions.tolist()),
    )


# ---- one rank ------------------------------------------------------------------------------------------------------


def _check_rank(program: Program, rank: int) -> None:
    """Check that a rank does everything its stages need exactly once, and nothing before its inputs."""
    done = Counter(fact for action in program.actions[rank] for fact in _facts(action))
    wanted = set(_wanted(program, rank))
    for what, wrong in (("is missing", wanted - done.keys()), ("does not belong here", done.keys() - wanted)):
        if wrong:
            raise ProgramError(f"pipeline rank {rank}: {_named(min(wrong, key=str), program, rank)} {what}")
    if done.total() > len(wanted):
        for fact, times in done.items():
            if times > 1:
                raise ProgramError(f"pipeline rank {rank}: {_named(fact, program, rank)} occurs {times} times")
    seen: set[Action] = set()
    for action in program.actions[rank]:
        for needed in _needs(action, program, rank):
            if needed not in seen:
                raise ProgramError(f"pipeline rank {rank}: {action} comes before {_named(needed, program, rank)}")
        seen.update(_facts(action))


def _facts(action: Action) -> tuple[Action, ...]:
    """Return the facts that an action establishes, without the weight version of a pass."""
    if action.op in HALVES:
        return tuple(Action(half, *action[1:4]) for half in HALVES[action.op])
    return (action,)


def _named(fact: Action, program: Program, rank: int) -> Action:
    """Return a half of a backward as it appears in the rank's actions: alone, or as part of a full backward."""
    unsplit = fact._replace(op=Op.BACKWARD) if fact.op in HALVES[Op.BACKWARD] else fact
    return unsplit if any(a.op is Op.BACKWARD and a.stage == fact.stage for a in program.actions[rank]) else fact


def _wanted(program: Program, rank: int) -> Iterable[Action]:
    passes = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    for stage in program.rank_stages(rank):
        for m, part, op in product(program.stage_microbatches(stage), _parts(program), passes):
            action = Action(op, stage, m, part)
            yield action
            if receive := find_receive(action, program):
                yield receive
            yield from find_sends(action, program)
        yield from _updates(Op.REDUCE, program, stage)
        if program.gathers:
            yield from _updates(Op.GATHER, program, stage)
        if program.updates > 1:
            yield from _updates(Op.STEP, program, stage)
    if program.updates == 1:
        yield Action(Op.STEP)


def _updates(op: Op, program: Program, stage: int) -> list[Action]:
    """Return a stage's part in each update: one for the full step, or one per version that it creates."""
    if program.updates == 1:
        return [Action(op, stage)]
    return [Action(op, stage, version=version) for version in range(1, program.updates + 1)]


def _needs(action: Action, program: Program, rank: int) -> Iterator[Action]:
    """Yield the actions that the same rank must do before an action."""
    op, stage, microbatch, part, version = action
    if op in SENDS:
        yield Action(Op.FORWARD if op is Op.SEND_FORWARD else Op.BACKWARD_INPUT, stage, microbatch, part)
    elif op is Op.BACKWARD_WEIGHT:
        yield Action(Op.BACKWARD_INPUT, stage, microbatch, part)
    elif op in FORWARDS | BACKWARDS:
        if receive := find_receive(action, program):
            yield receive
        if op is Op.FORWARD and part > 0:  # keys and values of the previous slice
            yield Action(op, stage, microbatch, part - 1)
        if op is not Op.FORWARD:
            yield Action(Op.FORWARD, stage, microbatch, part)
            if 0 <= part < program.sequence_slices - 1:  # gradients of the next slice
                yield Action(Op.BACKWARD_INPUT, stage, microbatch, part + 1)
    elif op is Op.REDUCE:  # all gradients of the stage, or of its update if the program has several
        for m, i in product(program.stage_microbatches(stage), _parts(program)):
            if version < 0 or program.update_by_microbatch[m] == version - 1:
                yield Action(Op.BACKWARD_WEIGHT, stage, m, i)
    elif op is Op.STEP:  # every stage's gradients; for a later update of one stage, its own
        for held in [stage] if version > 0 else program.rank_stages(rank):
            yield Action(Op.REDUCE, held, version=version)
    elif op is Op.GATHER:
        yield action._replace(op=Op.STEP) if version > 0 else Action(Op.STEP)


def _parts(program: Program) -> Sequence[int]:
    return range(program.sequence_slices) if program.sequence_slices > 1 else (-1,)


def _check_versions(program: Program, rank: int) -> None:
    """Check that every pass uses an existing version, a backward the version of its forward, and updates add to the
    next.

    A program with one update has one version, which passes do not name.
    """
    made: dict[int, int] = {}  # newest version of each stage
    through: dict[tuple[int, int, int], int] = {}  # version used by each micro-batch's forward
    makes = Op.GATHER if program.gathers else Op.STEP
    for action in program.actions[rank]:
        op, stage, microbatch, part, version = action
        if op in HALVES and (version >= 0) != (program.updates > 1):
            raise ProgramError(f"pipeline rank {rank}: {action} names {'no' if version < 0 else 'a'} version")
        if program.updates == 1:
            continue
        newest = made.get(stage, 0)
        if op is makes:
            made[stage] = version
        elif op is Op.FORWARD:
            through[stage, microbatch, part] = version
            if version > newest:
                making = Action(makes, stage, version=version)
                raise ProgramError(f"pipeline rank {rank}: {action} comes before {making}")
        elif op in HALVES:
            came = through[stage, microbatch, part]
            if version != came:
                raise ProgramError(f"pipeline rank {rank}: {action} goes back through another version than {came}")
            update = program.update_by_microbatch[microbatch]
            if update != newest:
                raise ProgramError(
                    f"pipeline rank {rank}: {action} adds to the gradient of version {newest + 1}, which on the first "
                    f"rank goes into version {update + 1}"
                )


# ---- between ranks -------------------------------------------------------------------------------------------------


def _check_messages(program: Program) -> None:
    """Check that both ranks order their messages equally: in one direction, messages match by order alone."""
    sent: dict[tuple[Op, int, int], list[Action]] = defaultdict(list)
    expected: dict[tuple[Op, int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(program.actions):
        for action in actions:
            if action.op in SENDS:
                target = program.stage_rank[action.stage + (1 if action.op is Op.SEND_FORWARD else -1)]
                sent[action.op, rank, target].append(action)
            elif action.op in RECEIVES:
                send = matching_send(action)
                expected[send.op, program.stage_rank[send.stage], rank].append(send)
    for op, source, target in sent.keys() | expected.keys():
        left, wanted = sent[op, source, target], expected[op, source, target]
        if left != wanted:
            raise ProgramError(
                f"messages of {op.name.removeprefix('SEND_')} from pipeline rank {source} to {target} differ: "
                f"sent {' '.join(map(str, left))}; expected {' '.join(map(str, wanted))}"
            )
