"""A short program, played in plain numbers: what `shoal.pipeline.simulator` finds in arrays, which take longer to
import.

Every rank does its actions in their order, each as soon as what it needs is there; a result leaves as soon as it is
made, and messages of one rank to one other go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

from shoal.base.errors import UsageError
from shoal.pipeline.program import BACKWARDS, COMPUTE, FORWARDS, SENDS, WEIGHTS, Op, Program

Passes = Sequence[tuple[float, float, float]]
KINDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
NTH = 3  # micro-batches that are told apart: the first, the second, and all later ones
NONE, SOME, EVERY = range(3)  # of a rank's other stages, which are after a forward
TOLD_APART = (len(KINDS) + 1, NTH, NTH, 2, 3)  # see `shoal.planning.cost.memory.stage.TIMES`
LONGEST = 10_000  # actions, from which on arrays are faster


class Played(NamedTuple):
    """A step that was played.

    Attributes:
        seconds: from its begin to the end of the last action, anywhere.
        busy: [ranks] seconds in computations.
    """

    seconds: float
    busy: list[float]


def is_short(program: Program) -> bool:
    """Whether `play` takes a program: a single copy of the model, whole sequences, one update, few actions, and none of
    them transfers."""
    plain = program.copies == program.parts == program.updates == 1 and sum(map(len, program.actions)) <= LONGEST
    return plain and not any(action.op in SENDS for actions in program.actions for action in actions)


def play(program: Program, passes: Passes, finishing: Passes, time: float = 0.0, latency: float = 0.0) -> Played:
    """Play one step of a short program.

    Args:
        passes: [stages] seconds of a forward and of both halves of a backward.
        finishing: [stages] seconds of what follows the last backward: reduction, update, gather.
        time: that a message occupies its link.
        latency: until it is there after that.

    Raises:
        UsageError: ranks wait for each other.
    """
    ranks, table, holder = range(program.ranks), _table(program, passes, finishing), program.stage_rank
    clock, busy, place = [0.0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]
    arrived: dict[tuple[int, int, int], float] = {}  # results, by the stages from which to which and the micro-batch
    free: dict[tuple[int, int], float] = {}  # when a link has sent all before
    waiting: dict[tuple[int, int, int], int] = {}
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        actions = program.actions[rank]
        while place[rank] < len(actions):
            op, stage, microbatch, *_ = actions[place[rank]]
            step = 1 if op in FORWARDS else -1 if op in BACKWARDS else 0
            before, after = stage - step, stage + step
            begin = clock[rank]
            if step and 0 <= before < len(holder) and holder[before] != rank:
                needed = before, stage, microbatch
                if needed not in arrived:
                    waiting[needed] = rank
                    break
                begin = max(begin, arrived[needed])
            lasting = table[op][stage]  # a step's stage is -1, the last of one
            clock[rank] = begin + lasting
            busy[rank] += lasting if op in COMPUTE else 0.0
            if step and 0 <= after < len(holder) and holder[after] != rank:
                made, link = (stage, after, microbatch), (rank, holder[after])
                free[link] = max(clock[rank], free.get(link, 0.0)) + time
                arrived[made] = free[link] + latency
                if made in waiting:
                    ready.append(waiting.pop(made))
            place[rank] += 1
    if waiting:
        stuck = (f"pipeline rank {rank} at {program.actions[rank][place[rank]]}" for rank in waiting.values())
        raise UsageError("deadlock, every rank waits for another: " + ", ".join(stuck))
    return Played(max(clock), busy)


def _table(program: Program, passes: Passes, finishing: Passes) -> dict[Op, list[float]]:
    """[stages] seconds by what is done; an update is a whole rank's, and the longest counts for all."""
    forward, inputs, weights = (list(column) for column in zip(*passes, strict=True))
    reduce, update, gather = (list(column) for column in zip(*finishing, strict=True))
    longest = max(sum(update[stage] for stage in program.stages_of(rank)) for rank in range(program.ranks))
    return {
        Op.FORWARD: forward, Op.BACKWARD: [sum(halves) for halves in zip(inputs, weights, strict=True)],
        Op.BACKWARD_INPUT: inputs, Op.BACKWARD_WEIGHT: weights, Op.REDUCE: reduce, Op.STEP: [longest],
        Op.GATHER: gather,
    }  # fmt: skip


def before_backwards(
    program: Program, whole: Sequence[float], half: Sequence[float], passing: float
) -> list[list[float]]:
    """[stages] as `shoal.pipeline.simulator.columns.before_backwards` has it.

    Args:
        whole: [stages] that a micro-batch's forward leaves.
        half: [stages] that is there between the halves.
        passing: what lies between two stages: those of a rank that follow each other have it once.
    """
    holder, found = program.stage_rank, [[-inf] * prod(TOLD_APART) for _ in program.stage_rank]
    here = [s % program.depth > 0 and holder[s] == holder[s - 1] for s in range(program.stages)]
    far = [s % program.depth > 0 and holder[s] != holder[s - 1] for s in range(program.stages)]
    here_behind, far_behind = [*here[1:], False], [*far[1:], False]
    whole = [kept - passing * beside for kept, beside in zip(whole, here, strict=True)]
    over, forward = [0] * len(found), [False] * len(found)
    for rank, actions in enumerate(program.actions):
        now, messages, gone, stages = 0.0, 0, False, program.stages_of(rank)
        passes = [action for action in actions if action.op in FORWARDS or action.op in KINDS]
        comes = [
            (op in FORWARDS and far[stage]) or (op in BACKWARDS and far_behind[stage]) for op, stage, *_ in passes
        ]  # fmt: skip
        for (op, stage, *_), next_comes in zip(passes, [*comes, False][1:], strict=True):
            if op in FORWARDS:
                now += whole[stage]
                kind = len(KINDS)
            else:
                kind = KINDS.index(op)
            messages -= op in BACKWARDS and here_behind[stage]
            made, others = over[stage], sum(over[s] for s in stages) - over[stage]
            after = sum(forward[s] for s in stages) - forward[stage]
            row = (kind * NTH + min(made, NTH - 1)) * NTH + min(others, NTH - 1)
            row = (row * 2 + forward[stage]) * 3 + min(after, SOME) + (0 < after == len(stages) - 1)
            found[stage][row] = max(found[stage][row], now + passing * (messages + gone + next_comes))
            if kind < len(KINDS):
                now -= (whole[stage], whole[stage] - half[stage], half[stage])[kind]
                over[stage] += op in WEIGHTS
            if op in FORWARDS | BACKWARDS:
                forward[stage] = op in FORWARDS
                messages += op in BACKWARDS and here[stage]
                if (far_behind if op in FORWARDS else far)[stage]:
                    gone = op in BACKWARDS
    return found
