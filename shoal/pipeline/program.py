"""The `Program` of one training step: for each rank, its ordered actions.

A schedule gives the order of computations on each rank; `build_program` adds the transfers between them and what
follows the last backward; `shoal.pipeline.checker` proves the result complete and free of deadlock. The runtime
executes it, and any other reader (a simulator, a drawing) sees exactly what runs.
"""

from __future__ import annotations

from collections import deque
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

    A stage is a run of consecutive layers. With several `copies` of the model (DualPipe) the stages of the second
    follow those of the first: of S stages in all, stage s computes part ``s % depth`` of the model, depth = S / copies.

    Attributes:
        actions: for each pipeline rank, its actions in order.
        stage_rank: for each stage, the pipeline rank that holds it.
        microbatches: how many micro-batches flow through; consecutive ones through each copy.
        gathers: whether each stage's updated parameters must be gathered after the step.
        copies: of the model, each on all ranks together.
        parts: slices of the sequence that each micro-batch is cut into.
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
    copies: int = 1
    parts: int = 1
    updates: int = 1
    layers: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages, over all copies."""
        return len(self.stage_rank)

    @property
    def depth(self) -> int:
        """Number of stages that a micro-batch passes through."""
        return self.stages // self.copies

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
        return range(copy * self.microbatches // self.copies, (copy + 1) * self.microbatches // self.copies)


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
        copies: of the model.
        refuses: from (pipeline ranks, micro-batches, stages per rank) why they cannot be, or "".
        order: from (rank, pipeline ranks, micro-batches, stages per rank) the order of one rank alone, where it can be
            written down without the others'.
    """

    name: str
    source: str
    orders: Callable[[int, int, int], list[list[Action]]]
    placement: Callable[[int, int], tuple[int, ...]]
    virtual: int | None = 1
    copies: int = 1
    refuses: Callable[[int, int, int], str] = lambda ranks, microbatches, virtual: ""
    order: Callable[[int, int, int, int], list[Action]] | None = None


def build_program(
    schedule: Schedule, ranks: int, microbatches: int, *, virtual_stages: int = 1, zero: int = 0, parts: int = 1,
    transfers: bool = True,
) -> Program:  # fmt: skip
    """The program of a schedule.

    Args:
        ranks: pipeline ranks.
        virtual_stages: stages on each rank, where the schedule leaves that open.
        parts: slices that each sequence is cut into.
        zero: ZeRO stage: 1 and 2 gather the parameters after the step; 3 gathers them layer by layer inside the passes.
        transfers: between ranks are written down; who only plays the program knows where they are.

    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> program = build_program(SCHEDULES["1f1b"], ranks=2, microbatches=2)
    >>> [str(action) for action in program.actions[1]][:3]
    ['1RF0', '1F0', '1RF1']
    """
    virtual = schedule.virtual or virtual_stages
    stage_rank = schedule.placement(ranks, virtual)
    orders = [in_slices(order, parts) for order in schedule.orders(ranks, microbatches, virtual)]
    program = Program(
        tuple(tuple(a for a in order if a.op is not Op.STEP) for order in orders),
        stage_rank, microbatches, gathers=zero in (1, 2), copies=schedule.copies, parts=parts,
        updates=max(1, sum(a.op is Op.STEP for a in orders[0])),
    )
    computed = add_transfers(program) if transfers else program.actions
    actions = [
        _with_updates(order, actions, program) if program.updates > 1 else (*actions, *finish(program, rank))
        for rank, (order, actions) in enumerate(zip(orders, computed, strict=True))
    ]
    return replace(program, actions=tuple(map(tuple, actions)))


def in_slices(order: Sequence[Action], parts: int) -> list[Action]:
    """An order with each pass cut into slices of the sequence: forwards from the first to the last, backwards back."""
    if parts == 1:
        return list(order)
    slices = range(parts)
    return [
        action._replace(part=part) for action in order for part in (slices if action.op in FORWARDS else slices[::-1])
    ]


def add_transfers(program: Program) -> list[list[Action]]:
    """Put the sends and receives that the computations of a program need around them.

    A result is sent as soon as it is there. A receive is posted one computation early, so that the data can travel
    while the rank computes. Messages between two ranks in one direction match by their order alone, so a rank posts
    its receives in the order in which the sender computes, some before their turn.
    """
    channels: dict[tuple[Op, int, int], list[Action]] = {}
    for rank, order in enumerate(program.actions):
        for action in order:
            if receive := _received_as(action, program):
                target = program.stage_rank[receive.stage]
                channels.setdefault((receive.op, rank, target), []).append(receive)
    waiting = {key: deque(receives) for key, receives in channels.items()}
    return [_with_transfers(rank, order, program, waiting) for rank, order in enumerate(program.actions)]


def _with_transfers(
    rank: int, order: Sequence[Action], program: Program, waiting: dict[tuple[Op, int, int], deque[Action]]
) -> list[Action]:
    actions: list[Action] = []
    posted: set[Action] = set()

    def post(action: Action) -> None:
        needed = receive_of(action, program)
        if needed is None or needed in posted:
            return
        source = program.stage_rank[sender_of(needed).stage]
        queue = waiting.get((needed.op, source, rank), deque())
        while queue and needed not in posted:
            actions.append(queue.popleft())
            posted.add(actions[-1])

    for now, action in enumerate(order):
        if now == 0:
            post(action)
        for ahead in order[now + 1 : now + 2]:
            post(ahead)
        actions.append(action)
        actions += sends_of(action, program)
    return actions


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


def _with_updates(order: Sequence[Action], actions: Sequence[Action], program: Program) -> Iterator[Action]:
    """Put a stage's updates where its order has them, after the sends of the backward before."""
    step_after = {backward: step for backward, step in pairwise(order) if step.op is Op.STEP}
    due: list[Action] = []
    for action in actions:
        if action.op not in SENDS:
            yield from due
            due = []
        yield action
        if action in step_after:
            step = step_after[action]
            around = (Op.REDUCE, Op.STEP, Op.GATHER) if program.gathers else (Op.REDUCE, Op.STEP)
            due = [step._replace(op=op) for op in around]
    yield from due


def finish(program: Program, rank: int) -> list[Action]:
    """What follows a rank's last backward. Stages in the model's order, so that two copies' ranks meet at each."""
    stages = sorted(program.stages_of(rank), key=lambda stage: stage % program.depth)
    reduces, updated = ([Action(op, stage) for stage in stages] for op in (Op.REDUCE, Op.GATHER))
    return [*reduces, Action(Op.STEP), *(updated if program.gathers else ())]
