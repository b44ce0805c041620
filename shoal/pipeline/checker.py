"""Proof that a program is complete, ordered and free of deadlock; what it costs in memory and idle time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.pipeline.program import (
    RECEIVES,
    SENDS,
    WEIGHTS,
    Action,
    Op,
    Program,
    StageDurations,
    receive_of,
    sender_of,
    sends_of,
)

# What a computation has done when it ends: a whole backward is both of its halves.
HALVES = {
    Op.FORWARD: (Op.FORWARD,),
    Op.BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
    Op.BACKWARD_INPUT: (Op.BACKWARD_INPUT,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
}


class ProgramError(ValueError):
    """A program that would compute something else, or hang."""


@dataclass(frozen=True)
class Check:
    """What a program costs with given times.

    Attributes:
        peak_live: for each pipeline rank, the most activations alive at once, in activations of one stage for one
            micro-batch. One is alive from its forward until its weight gradients are done; what the first half of a
            split backward could free already (Qi et al. 2024, table 1: M_B - M_W) is not taken off.
        bubble: idle share of a rank's time from its first computation to its last, of the rank where that takes
            longest: what a step costs where ranks need not wait for one another at its end (Qi et al. 2024, section
            5.1), and the same as `flushed_bubble` for schedules without a split backward.
        flushed_bubble: idle share of the step, over all ranks, from the first computation of all to the last of all:
            what a step costs where every rank waits for all at its end, as a gradient norm over all stages makes it.
        peak_versions: for each pipeline rank, the most versions of its weights kept at once.
    """

    peak_live: tuple[int, ...]
    bubble: float
    flushed_bubble: float
    peak_versions: tuple[int, ...]


def check_program(program: Program, times: StageDurations | None = None, *, tied: bool = False) -> Check:
    """Play a program and prove it.

    Args:
        times: of the passes; by default a forward and each half of a backward take 1 and transfers nothing.
        tied: the first and the last stage share an embedding, and wait for each other's gradients of it at each update
            of an asynchronous program.

    Raises:
        ProgramError: an action is missing, repeated, on the wrong rank or before what it needs (`RULES`); a message has
            no counterpart or arrives in another order than it is expected in; or every rank waits for another.

    >>> from shoal.pipeline.program import build_program
    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> found = check_program(build_program(SCHEDULES["1f1b"], ranks=4, microbatches=8))
    >>> found.peak_live, round(found.bubble, 3)
    ((4, 3, 2, 1), 0.273)
    """
    for rank in range(program.ranks):
        _check_rank(program, rank)
        _check_versions(program, rank)
    _check_messages(program)
    times = times or StageDurations()
    spans = _play(program, times, tied)
    lasting = {Op.FORWARD: times.forward, Op.BACKWARD_INPUT: times.input, Op.BACKWARD_WEIGHT: times.weight}
    busy = sum(lasting[half] for actions in program.actions for a in actions for half in HALVES.get(a.op, ()))
    busy /= program.ranks
    longest = max(end - begin for begin, end in spans)
    step = max(end for _, end in spans)
    return Check(
        peak_live=tuple(_peak_live(actions) for actions in program.actions),
        bubble=1 - busy / longest if longest else 0.0,
        flushed_bubble=1 - busy / step if step else 0.0,
        peak_versions=tuple(map(_peak_versions, program.actions)),
    )


# ---- one rank ------------------------------------------------------------------------------------------------------


def _check_rank(program: Program, rank: int) -> None:
    """A rank does all that its stages need, once, and nothing before what it needs."""
    done = Counter(fact for action in program.actions[rank] for fact in _facts(action))
    wanted = set(_wanted(program, rank))
    for what, wrong in (("is missing", wanted - done.keys()), ("does not belong here", done.keys() - wanted)):
        if wrong:
            raise ProgramError(f"pipeline rank {rank}: {_named(min(wrong, key=str), program, rank)} {what}")
    if done.total() > len(wanted):
        for fact, times in done.items():
            if times > 1:
                raise ProgramError(f"pipeline rank {rank}: {_named(fact, program, rank)} is there {times} times")
    seen: set[Action] = set()
    for action in program.actions[rank]:
        rule = RULES.get(action.op)
        if rule:
            for needed in rule(action, program, rank):
                if needed not in seen:
                    raise ProgramError(f"pipeline rank {rank}: {action} comes before {_named(needed, program, rank)}")
        seen.update(_facts(action))


def _facts(action: Action) -> tuple[Action, ...]:
    """What is done when an action is, but for the version of the weights that a pass is done with."""
    if action.op in HALVES:
        return tuple(Action(half, *action[1:4]) for half in HALVES[action.op])
    return (action,)


def _named(fact: Action, program: Program, rank: int) -> Action:
    """A half of a backward as the rank's actions have it: by itself, or as part of the whole."""
    whole = fact._replace(op=Op.BACKWARD) if fact.op in HALVES[Op.BACKWARD] else fact
    return whole if any(a.op is Op.BACKWARD and a.stage == fact.stage for a in program.actions[rank]) else fact


def _wanted(program: Program, rank: int) -> Iterable[Action]:
    """All that a rank must do."""
    parts = range(program.parts) if program.parts > 1 else (-1,)
    for stage in program.stages_of(rank):
        for m in program.microbatches_of(stage):
            for part in parts:
                for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                    action = Action(op, stage, m, part)
                    yield action
                    if receive := receive_of(action, program):
                        yield receive
                    yield from sends_of(action, program)
        yield from _updates(Op.REDUCE, program, stage)
        if program.gathers:
            yield from _updates(Op.GATHER, program, stage)
        if program.updates > 1:
            yield from _updates(Op.STEP, program, stage)
    if program.updates == 1:
        yield Action(Op.STEP)


def _updates(op: Op, program: Program, stage: int) -> list[Action]:
    """A stage's part in each update: one for the whole step, or one for each version that it makes."""
    if program.updates == 1:
        return [Action(op, stage)]
    return [Action(op, stage, version=version) for version in range(1, program.updates + 1)]


def _computation(action: Action, program: Program, rank: int) -> Iterable[Action]:
    """A forward or a backward needs its message; a backward, its forward too.

    With slices, a forward needs the keys and values of the slice before, a backward the gradients of the slice after.
    """
    op, stage, microbatch, part, _ = action
    if op is not Op.FORWARD:
        yield Action(Op.FORWARD, stage, microbatch, part)
    if op is Op.BACKWARD_WEIGHT:
        yield Action(Op.BACKWARD_INPUT, stage, microbatch, part)
        return
    if op is Op.FORWARD and part > 0:
        yield Action(op, stage, microbatch, part - 1)
    elif op is not Op.FORWARD and 0 <= part < program.parts - 1:
        yield Action(Op.BACKWARD_INPUT, stage, microbatch, part + 1)
    if receive := receive_of(action, program):
        yield receive


def _send(action: Action, program: Program, rank: int) -> Iterable[Action]:
    """A message needs the computation that makes it."""
    source = Op.FORWARD if action.op is Op.SEND_FORWARD else Op.BACKWARD_INPUT
    yield Action(source, action.stage, action.microbatch, action.part)


def _reduce(action: Action, program: Program, rank: int) -> Iterable[Action]:
    """The reduction of a stage's gradients needs all of them: all of its update's, if there are several."""
    parts = range(program.parts) if program.parts > 1 else (-1,)
    for m in program.microbatches_of(action.stage):
        if action.version < 0 or program.update_of[m] == action.version - 1:
            for part in parts:
                yield Action(Op.BACKWARD_WEIGHT, action.stage, m, part)


def _step(action: Action, program: Program, rank: int) -> Iterable[Action]:
    """The optimizer needs every stage's gradients; a later update of a stage, its own."""
    for stage in [action.stage] if action.version > 0 else program.stages_of(rank):
        yield Action(Op.REDUCE, stage, version=action.version)


def _gather(action: Action, program: Program, rank: int) -> Iterable[Action]:
    """What is gathered are the updated parameters."""
    yield action._replace(op=Op.STEP) if action.version > 0 else Action(Op.STEP)


# What the same rank must have done before an action.
RULES: dict[Op, Callable[[Action, Program, int], Iterable[Action]]] = {
    **dict.fromkeys(HALVES, _computation),
    **dict.fromkeys(SENDS, _send),
    Op.REDUCE: _reduce,
    Op.STEP: _step,
    Op.GATHER: _gather,
}


def _check_versions(program: Program, rank: int) -> None:
    """Every pass uses weights that are there, a backward its forward's, and adds to the gradient of the next version.

    A program with one update has one version, which no pass names.
    """
    made: dict[int, int] = {}  # the newest version of each stage
    through: dict[tuple[int, int, int], int] = {}  # which version each micro-batch came forward with
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
            update = program.update_of[microbatch]
            if update != newest:
                raise ProgramError(
                    f"pipeline rank {rank}: {action} adds to the gradient of version {newest + 1}, which on the first "
                    f"rank goes into version {update + 1}"
                )


# ---- between ranks -------------------------------------------------------------------------------------------------


def _check_messages(program: Program) -> None:
    """Between two ranks and in one direction, messages match by their order alone: so the orders must agree."""
    sent: dict[tuple[Op, int, int], list[Action]] = {}
    expected: dict[tuple[Op, int, int], list[Action]] = {}
    for rank, actions in enumerate(program.actions):
        for a in actions:
            if a.op in SENDS:
                direction, other, orders = (Op.FORWARD, 1, sent) if a.op is Op.SEND_FORWARD else (Op.BACKWARD, -1, sent)
                orders.setdefault((direction, rank, program.stage_rank[a.stage + other]), []).append(a)
            elif a.op in RECEIVES:
                send = sender_of(a)
                direction = Op.FORWARD if a.op is Op.RECV_FORWARD else Op.BACKWARD
                expected.setdefault((direction, program.stage_rank[send.stage], rank), []).append(send)
    for key in sent.keys() | expected.keys():
        direction, source, target = key
        if sent.get(key) != expected.get(key):
            raise ProgramError(
                f"messages of {direction.name} from pipeline rank {source} to {target} differ: "
                f"sent {' '.join(map(str, sent.get(key, [])))}; expected {' '.join(map(str, expected.get(key, [])))}"
            )


def _play(program: Program, times: StageDurations, tied: bool) -> list[tuple[float, float]]:
    """Run every rank as far as it goes, again when what it waits for is there; when each begins and ends its work."""
    lasting = {
        Op.FORWARD: times.forward,
        Op.BACKWARD: times.input + times.weight,
        Op.BACKWARD_INPUT: times.input,
        Op.BACKWARD_WEIGHT: times.weight,
    }
    at, clock = [0] * program.ranks, [0.0] * program.ranks
    begun: list[float | None] = [None] * program.ranks
    there: dict[Action, float] = {}  # messages sent, results kept on the rank, stages reduced: and when
    waiting: dict[Action, list[int]] = {}  # the ranks that wait for one
    runnable = deque(range(program.ranks))

    def reached(what: Action, time: float) -> None:
        there[what] = time
        runnable.extend(waiting.pop(what, ()))

    while runnable:
        rank = runnable.popleft()
        actions = program.actions[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            op = action.op
            if op is Op.REDUCE:
                reached(action, clock[rank])
            needs = _awaited(action, program, tied)
            missing = next((needed for needed in needs if needed not in there), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            if op in SENDS:
                reached(action, clock[rank] + times.communication)
            elif op in lasting:
                start = max([clock[rank], *(there[needed] for needed in needs)])
                clock[rank] = start + lasting[op]
                if begun[rank] is None:
                    begun[rank] = start
                if op is not Op.BACKWARD_WEIGHT:
                    half = Op.FORWARD if op is Op.FORWARD else Op.BACKWARD_INPUT
                    reached(Action(half, *action[1:4]), clock[rank])
    stuck = [
        f"pipeline rank {rank} waits at {actions[at[rank]]}"
        for rank, actions in enumerate(program.actions) if at[rank] < len(actions)
    ]
    if stuck:
        raise ProgramError("deadlock: " + "; ".join(stuck))
    return [(begin or 0.0, end) for begin, end in zip(begun, clock, strict=True)]


def _awaited(action: Action, program: Program, tied: bool) -> list[Action]:
    """What an action waits for: the result before it, and at a reduction those who share what is reduced."""
    op, stage, microbatch, part, version = action
    if op is Op.REDUCE:
        copies = range(stage % program.depth, program.stages, program.depth)
        far = [copy for copy in copies if program.stage_rank[copy] != program.stage_rank[stage]]
        return [action._replace(stage=copy) for copy in far]
    if op is Op.STEP and version > 0:
        shared = tied and (program.is_first(stage) or program.is_last(stage))
        return [Action(Op.REDUCE, end, version=version) for end in (0, program.depth - 1) if shared]
    if op not in HALVES or op is Op.BACKWARD_WEIGHT:
        return []
    if receive := receive_of(action, program):
        return [sender_of(receive)]
    if op is Op.FORWARD and not program.is_first(stage):
        return [Action(op, stage - 1, microbatch, part)]
    if op is not Op.FORWARD and not program.is_last(stage):
        return [Action(Op.BACKWARD_INPUT, stage + 1, microbatch, part)]
    return []


def _peak_live(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        if action.op is Op.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.op in WEIGHTS:
            live -= 1
    return peak


def _peak_versions(actions: tuple[Action, ...]) -> int:
    """The newest, and those before it that are used again."""
    last_use = {action.version: i for i, action in enumerate(actions) if action.op in HALVES}
    steps = [(i, action.version) for i, action in enumerate(actions) if action.op is Op.STEP and action.version > 0]
    return max((1 + sum(v < version and last > i for v, last in last_use.items()) for i, version in steps), default=1)
