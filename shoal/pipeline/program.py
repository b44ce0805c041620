"""The `Program` of one training step: for each rank, its ordered actions.

A schedule gives the order of computations on each rank; `build` adds the transfers between them and what follows the
last backward; `shoal.pipeline.checker` proves the result complete and free of deadlock. The runtime executes it, and
any other reader (a simulator, a drawing) sees exactly what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SF"  # activations, to the next stage
    RECV_FORWARD = "RF"  # activations, from the stage before; posted, not waited for
    SEND_BACKWARD = "SB"  # gradients, to the stage before
    RECV_BACKWARD = "RB"  # gradients, from the next stage; posted, not waited for
    REDUCE = "R"  # finish the gradient reductions of a stage
    STEP = "S"  # the optimizer, once a rank
    GATHER = "G"  # the updated parameters of a stage, from the ranks that hold their shards


@dataclass(frozen=True)
class Action:
    """One thing that one rank does.

    Attributes:
        op: what.
        stage: the pipeline stage it is done for (-1 for the whole rank).
        microbatch: which micro-batch of the step (-1 where it concerns none).
    """

    op: Op
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        """``1F3``: stage 1, forward, micro-batch 3."""
        stage, microbatch = (str(i) if i >= 0 else "" for i in (self.stage, self.microbatch))
        return f"{stage}{self.op}{microbatch}"


@dataclass(frozen=True)
class Program:
    """Every pipeline rank's actions for one step.

    Attributes:
        actions: for each pipeline rank, its actions in order.
        stage_rank: for each stage, the pipeline rank that holds it.
        microbatches: how many micro-batches flow through.
        gathers: whether each stage's updated parameters must be gathered after the step.
    """

    actions: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    microbatches: int
    gathers: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds."""
        return [stage for stage, holder in enumerate(self.stage_rank) if holder == rank]


def build(
    schedule: Callable[[int, int, int], list[Action]], ranks: int, microbatches: int, *, zero: int = 0
) -> Program:
    """The program of a schedule with one stage on each rank.

    Args:
        schedule: gives a rank's FORWARDs and BACKWARDs in order, from (rank, stages, microbatches).
        zero: ZeRO stage: 1 and 2 gather the parameters after the step; 3 gathers them layer by layer inside the passes.
    """
    stage_rank = tuple(range(ranks))
    compute = [schedule(rank, ranks, microbatches) for rank in range(ranks)]
    actions = add_transfers(compute, stage_rank)
    gathers = zero in (1, 2)
    whole = tuple((*order, *_finish(rank, stage_rank, gathers)) for rank, order in enumerate(actions))
    return Program(whole, stage_rank, microbatches, gathers)


def add_transfers(compute: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> list[list[Action]]:
    """Put the sends and receives that the computations need around them.

    A result is sent as soon as it is there. A receive is posted one computation early, so that the data can travel
    while the rank computes.
    """
    last = len(stage_rank) - 1
    programs = []
    for order in compute:
        program: list[Action] = []
        receives = [_receive(action, stage_rank, last) for action in order]
        program += [r for r in receives[:1] if r]
        for i, action in enumerate(order):
            program += [r for r in receives[i + 1 : i + 2] if r]
            program.append(action)
            send = _send(action, stage_rank, last)
            program += [send] if send else []
        programs.append(program)
    return programs


def _receive(action: Action, stage_rank: Sequence[int], last: int) -> Action | None:
    stage, here = action.stage, stage_rank[action.stage]
    if action.op is Op.FORWARD and stage > 0 and stage_rank[stage - 1] != here:
        return Action(Op.RECV_FORWARD, stage, action.microbatch)
    if action.op is Op.BACKWARD and stage < last and stage_rank[stage + 1] != here:
        return Action(Op.RECV_BACKWARD, stage, action.microbatch)
    return None


def _send(action: Action, stage_rank: Sequence[int], last: int) -> Action | None:
    stage, here = action.stage, stage_rank[action.stage]
    if action.op is Op.FORWARD and stage < last and stage_rank[stage + 1] != here:
        return Action(Op.SEND_FORWARD, stage, action.microbatch)
    if action.op is Op.BACKWARD and stage > 0 and stage_rank[stage - 1] != here:
        return Action(Op.SEND_BACKWARD, stage, action.microbatch)
    return None


def _finish(rank: int, stage_rank: Sequence[int], gathers: bool) -> list[Action]:
    stages = [stage for stage, holder in enumerate(stage_rank) if holder == rank]
    reduces, updated = ([Action(op, stage) for stage in stages] for op in (Op.REDUCE, Op.GATHER))
    return [*reduces, Action(Op.STEP), *(updated if gathers else ())]
