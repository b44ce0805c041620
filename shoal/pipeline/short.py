"""A short program, played in plain numbers: what `shoal.simulate` finds in arrays, which take longer to import.

Every rank does its actions in their order, each as soon as what it needs is there; a result leaves as soon as it is
made, and messages of one rank to one other go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.pipeline.program import BACKWARDS, COMPUTE, FORWARDS, SENDS, WEIGHTS, Op, Program

Passes = Sequence[tuple[float, float, float]]
LONGEST = 10_000  # actions, from which on arrays are faster


@dataclass(frozen=True)
class Played:
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


def alive(program: Program, kept: Sequence[float]) -> list[float]:
    """[ranks] the most that is kept at once of micro-batches between their forward and the end of their backward.

    Args:
        kept: [stages] of one micro-batch.
    """
    found = []
    for actions in program.actions:
        now = most = 0.0
        for action in actions:
            if action.op in FORWARDS:
                now += kept[action.stage]
                most = max(most, now)
            elif action.op in WEIGHTS:
                now -= kept[action.stage]
        found.append(most)
    return found
