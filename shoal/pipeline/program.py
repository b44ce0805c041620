"""The `Program` of one training step: for each rank, its ordered actions.

A schedule gives the order of computations on each rank; `build_program` adds the transfers between them and what
follows the last backward; `shoal.pipeline.checker` proves the result complete and free of deadlock. The runtime
executes it, and any other reader (a simulator, a drawing) sees exactly what runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from shoal.base.errors import UsageError


class ProgramError(UsageError):
    """A program that would compute something else, or hang."""


class Op(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole of it: the gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # its first half: the gradient of the input, which the stage before waits for
    BACKWARD_WEIGHT = "W"  # its second half: the gradients of the weights, which nobody waits for
    SEND_FORWARD = "SF"  # activations, to the next stage
    RECV_FORWARD = "RF"  # activations, from the stage before; posted, not waited for
    SEND_BACKWARD = "SB"  # gradients, to the stage before
    RECV_BACKWARD = "RB"  # gradients, from the next stage; posted, not waited for
    REDUCE = "R"  # finish the gradient reductions of a stage
    STEP = "S"  # the optimizer: once a rank, or in an asynchronous program once for each version that it makes
    GATHER = "G"  # the updated parameters of a stage, from the ranks that hold their shards


FORWARDS = frozenset({Op.FORWARD})
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})  # what needs the gradient of a stage's output
WEIGHTS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # what adds to the gradients of a stage's weights
COMPUTE = FORWARDS | BACKWARDS | WEIGHTS
SENDS = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVES = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})


class Action(NamedTuple):
    """One thing that one rank does.

    Attributes:
        op: what.
        stage: the pipeline stage it is done for (-1 for the whole rank).
        microbatch: which micro-batch of the step (-1 where it concerns none).
        part: which slice of the sequence (-1 for all of it).
        version: of the stage's weights, counted in updates since the program began (-1 where there is but one).
    """

    op: Op
    stage: int = -1
    microbatch: int = -1
    part: int = -1
    version: int = -1

    def __str__(self) -> str:
        """``1F3``: stage 1, forward, micro-batch 3; ``1F3.2`` its slice 2; ``1F3@4`` with version 4 of the weights."""
        stage, microbatch = (str(i) if i >= 0 else "" for i in (self.stage, self.microbatch))
        part = f".{self.part}" if self.part >= 0 else ""
        version = f"@{self.version}" if self.version >= 0 else ""
        return f"{stage}{self.op}{microbatch}{part}{version}"


@dataclass(frozen=True)
class Program:
    """Every pipeline rank's actions for one step.

    A stage is a run of consecutive layers. With two copies of the model (DualPipe) the stages of the second follow
    those of the first: of S stages in all, stage s computes part ``s % depth`` of the model, depth = S / model_copies.

    Attributes:
        actions: for each pipeline rank, its actions in order.
        stage_rank: for each stage, the pipeline rank that holds it.
        microbatches: how many micro-batches flow through; consecutive ones through each copy.
        gathers: whether each stage's updated parameters must be gathered after the step.
        model_copies: how many there are, each on all ranks together.
        sequence_slices: that each micro-batch's sequences are cut into.
        updates: how often each stage's weights are updated in the course of the program.
        layers: of each part of the model, where the layout says; otherwise they are even.

    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> program = build_program(SCHEDULES["interleaved-1f1b"], ranks=2, microbatches=4, virtual_stages=2)
    >>> program.ranks, program.stages, list(program.stages_of(0))
    (2, 4, [0, 2])
    """

    actions: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    microbatches: int
    gathers: bool = False
    model_copies: int = 1
    sequence_slices: int = 1
    updates: int = 1
    layers: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages, over all copies."""
        return len(self.stage_rank)

    @property
    def depth(self) -> int:
        """Number of stages that a micro-batch passes through."""
        return self.stages // self.model_copies

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds."""
        return [stage for stage, holder in enumerate(self.stage_rank) if holder == rank]

    def actions_of(self, op: Op) -> list[Action]:
        """All actions of one kind."""
        return [action for actions in self.actions for action in actions if action.op is op]

    def is_first(self, stage: int) -> bool:
        """Whether a stage begins with the embedding."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage ends with the loss."""
        return stage % self.depth == self.depth - 1

    @cached_property
    def update_of(self) -> dict[int, int]:
        """For each micro-batch, the update (from 0) that its gradient goes into."""
        update, found = 0, {}
        for action in self.actions[0]:
            if action.op in WEIGHTS:
                found[action.microbatch] = update
            elif action.op is Op.REDUCE and self.updates > 1:
                update += 1
        return found

    def microbatches_of(self, stage: int) -> range:
        """The micro-batches that pass through a stage."""
        copy = stage // self.depth
        return range(copy * self.microbatches // self.model_copies, (copy + 1) * self.microbatches // self.model_copies)


class StageDurations(NamedTuple):
    """How long things take on one stage, in any unit."""

    forward: float = 1.0
    input: float = 1.0  # the first half of a backward
    weight: float = 1.0  # its second half
    communication: float = 0.0  # of one message


class Schedule(NamedTuple):
    """A published order of one step's computations.

    Attributes:
        name: in a layout.
        source: the paper, and where in it.
        orders: from (pipeline ranks, micro-batches, stages per rank) each rank's computations in order. An
            asynchronous schedule also says where each stage's STEPs are.
        placement: from (pipeline ranks, stages per rank) the rank of each stage.
        virtual: stages per rank, None where the user chooses.
        model_copies: how many there are.
        refuses: from (pipeline ranks, micro-batches, stages per rank) why they cannot be, or "".
        order: from (rank, pipeline ranks, micro-batches, stages per rank) the order of one rank alone, where it can be
            written down without the others'.
    """

    name: str
    source: str
    orders: Callable[[int, int, int], list[list[Action]]]
    placement: Callable[[int, int], tuple[int, ...]]
    virtual: int | None = 1
    model_copies: int = 1
    refuses: Callable[[int, int, int], str] = lambda ranks, microbatches, virtual: ""
    order: Callable[[int, int, int, int], list[Action]] | None = None


def build_program(
    schedule: Schedule, ranks: int, microbatches: int, *, virtual_stages: int = 1, zero: int = 0,
    sequence_slices: int = 1, transfers: bool = True,
) -> Program:  # fmt: skip
    """The program of a schedule.

    Args:
        ranks: pipeline ranks.
        virtual_stages: stages on each rank, where the schedule leaves that open.
        sequence_slices: that each sequence is cut into.
        zero: ZeRO stage: 1 and 2 gather the parameters after the step; 3 gathers them layer by layer inside the passes.
        transfers: between ranks are written down; who only plays the program knows where they are.

    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> program = build_program(SCHEDULES["1f1b"], ranks=2, microbatches=2)
    >>> [str(action) for action in program.actions[1]][:3]
    ['1RF0', '1F0', '1RF1']
    """
    virtual = schedule.virtual or virtual_stages
    stage_rank = schedule.placement(ranks, virtual)
    orders = [_cut(order, sequence_slices) for order in schedule.orders(ranks, microbatches, virtual)]
    program = Program(
        (), stage_rank, microbatches, gathers=zero in (1, 2), model_copies=schedule.model_copies,
        sequence_slices=sequence_slices, updates=max(1, sum(a.op is Op.STEP for a in orders[0])),
    )
    actions = tuple(tuple(_with_updates(order, program, rank)) for rank, order in enumerate(orders))
    program = replace(program, actions=actions)
    return add_transfers(program) if transfers else program


def _cut(order: list[Action], slices: int) -> list[Action]:
    """Cut each pass into slices of the sequence: forwards from the first to the last, backwards from the last."""
    if slices == 1:
        return order
    parts = range(slices)
    return [action._replace(part=i) for action in order for i in (parts if action.op in FORWARDS else parts[::-1])]


def _with_updates(order: list[Action], program: Program, rank: int) -> list[Action]:
    """Put reductions before, and gathers after, the updates that an order has, or one of all stages at its end.

    That takes the stages in the model's order, so that two copies' ranks meet at each.
    """
    if program.updates > 1:
        around = (Op.REDUCE, Op.STEP, Op.GATHER) if program.gathers else (Op.REDUCE, Op.STEP)
        ops = {Op.STEP: around}
        return [action._replace(op=op) for action in order for op in ops.get(action.op, (action.op,))]
    stages = sorted(program.stages_of(rank), key=lambda stage: stage % program.depth)
    reduces, gathers = ([Action(op, stage) for stage in stages] for op in (Op.REDUCE, Op.GATHER))
    return [*order, *reduces, Action(Op.STEP), *(gathers if program.gathers else ())]


def add_transfers(program: Program) -> Program:
    """Put the sends and receives that the computations of a program need around them.

    A result is sent as soon as it is there. A receive is posted one computation early, so that the data can travel
    while the rank computes. Messages between two ranks in one direction match by their order alone, so a rank posts
    its receives in the order in which the sender computes, some before their turn.
    """
    waiting: dict[tuple[Op, int, int], deque[Action]] = defaultdict(deque)  # receives, by their op and both ranks
    for rank, order in enumerate(program.actions):
        for action in order:
            if receive := _received_as(action, program):
                waiting[receive.op, rank, program.stage_rank[receive.stage]].append(receive)
    posted: set[Action] = set()

    def post(action: Action) -> Iterator[Action]:
        needed = receive_of(action, program)
        if needed is None:
            return
        source, target = program.stage_rank[sender_of(needed).stage], program.stage_rank[needed.stage]
        queue = waiting[needed.op, source, target]
        while queue and needed not in posted:
            posted.add(queue[0])
            yield queue.popleft()

    def with_transfers(order: Sequence[Action]) -> Iterator[Action]:
        passes = [action for action in order if action.op in COMPUTE]
        following = dict(pairwise(passes))
        for first in passes[:1]:
            yield from post(first)
        for action in order:
            if action in following:
                yield from post(following[action])
            yield action
            yield from sends_of(action, program)

    return replace(program, actions=tuple(tuple(with_transfers(order)) for order in program.actions))


def receive_of(action: Action, program: Program) -> Action | None:
    """The message that a computation needs from another rank."""
    return _message(action, action.stage, program)


def sender_of(receive: Action) -> Action:
    """The send that a receive is the other end of."""
    forward = receive.op is Op.RECV_FORWARD
    op, other = (Op.SEND_FORWARD, -1) if forward else (Op.SEND_BACKWARD, 1)
    return receive._replace(op=op, stage=receive.stage + other)


def sends_of(action: Action, program: Program) -> list[Action]:
    """The messages to other ranks that a computation is followed by."""
    receive = _received_as(action, program)
    return [sender_of(receive)] if receive else []


def _received_as(action: Action, program: Program) -> Action | None:
    """The receive, on another rank, of what a computation makes."""
    return _message(action, action.stage + (1 if action.op in FORWARDS else -1), program)


def _message(action: Action, target: int, program: Program) -> Action | None:
    """The receive of what a pass takes in or makes, by the stage that it goes to; None within a rank."""
    if action.op not in FORWARDS | BACKWARDS:
        return None
    op, source = (Op.RECV_FORWARD, target - 1) if action.op in FORWARDS else (Op.RECV_BACKWARD, target + 1)
    same_copy = source // program.depth == target // program.depth  # -1 and `stages` belong to none
    far = same_copy and program.stage_rank[source] != program.stage_rank[target]
    return Action(op, target, action.microbatch, action.part) if far else None
