"""The `Program` of one training step: the ordered actions of each rank.

A schedule gives the order of computations on each rank. `build_program` adds the transfers between them and the actions
after the last backward. `shoal.pipeline.checker` proves the result complete and free of deadlock. The runtime executes
it, and any other reader (a simulator, a drawing) sees exactly what runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pydantic import PositiveInt

from shoal.base.errors import UsageError


class ProgramError(UsageError):
    """Error for a program that would deadlock or compute a wrong result."""


class Op(StrEnum):
    """Kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"  # full backward: the gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # first half: the gradient of the input, which the previous stage waits for
    BACKWARD_WEIGHT = "W"  # second half: the gradients of the weights, which no stage waits for
    SEND_FORWARD = "SF"  # activations, to the next stage
    RECV_FORWARD = "RF"  # activations, from the previous stage; posted without waiting
    SEND_BACKWARD = "SB"  # gradients, to the previous stage
    RECV_BACKWARD = "RB"  # gradients, from the next stage; posted without waiting
    REDUCE = "R"  # finish the gradient reductions of a stage
    STEP = "S"  # the optimizer: once per rank, or in an asynchronous program once per version that it creates
    GATHER = "G"  # all-gather the updated parameters of a stage from their shards


FORWARDS = frozenset({Op.FORWARD})
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})  # ops that need the gradient of a stage's output
WEIGHTS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # ops that add to the gradients of a stage's weights
COMPUTE = FORWARDS | BACKWARDS | WEIGHTS
SENDS = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVES = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})


class Action(NamedTuple):
    """One action of one rank.

    Attributes:
        op: kind of the action.
        stage: pipeline stage (-1 for all stages of the rank).
        microbatch: micro-batch of the step (-1 if not applicable).
        part: slice of the sequence (-1 for all of it).
        version: version of the stage's weights, counted in updates since the program began (-1 if only one exists).
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
    """The actions of every pipeline rank for one step.

    A stage is a run of consecutive layers. With two copies of the model (DualPipe), the stages of the second follow the
    stages of the first: of S stages in all, stage s computes part ``s % depth`` of the model, depth = S / model_copies.

    Attributes:
        actions: for each pipeline rank, its actions in order.
        stage_rank: for each stage, the pipeline rank that holds it.
        microbatches: number of micro-batches; consecutive ones run through each copy.
        gathers: each stage's updated parameters must be gathered after the step.
        model_copies: number of model copies; each spans all ranks.
        sequence_slices: number of slices of each micro-batch's sequences.
        updates: number of updates of each stage's weights during the program.
        layers: layers of each part of the model, if the layout sets them; otherwise they are balanced.
        paired: a forward and a full backward of another stage that follows it run together (`pair_up`), so nothing is
            sent between them.

    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> program = build_program(SCHEDULES["interleaved-1f1b"], ranks=2, microbatches=4, virtual_stages=2)
    >>> program.ranks, program.stages, list(program.rank_stages(0))
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
    paired: bool = False

    def __post_init__(self) -> None:
        if not (self.actions and self.stage_rank):
            raise ProgramError("Program: there are no actions, or no stages.\n  Give `actions` for at least one rank, "
                               "and `stage_rank`, the rank of each stage.")

    def __repr__(self) -> str:
        actions = sum(map(len, self.actions))
        return (f"<Program: {self.ranks:,} ranks, {self.stages:,} stages, {self.microbatches:,} micro-batches, "
                f"{actions:,} actions>")

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
        return len(self.actions)

    def rank_stages(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank."""
        return [stage for stage, holder in enumerate(self.stage_rank) if holder == rank]

    def is_first(self, stage: int) -> bool:
        """Return whether a stage begins with the embedding."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Return whether a stage ends with the loss."""
        return stage % self.depth == self.depth - 1

    @cached_property
    def update_by_microbatch(self) -> dict[int, int]:
        """For each micro-batch, the update (from 0) that its gradient contributes to."""
        update, found = 0, {}
        for action in self.actions[0]:
            if action.op in WEIGHTS:
                found[action.microbatch] = update
            elif action.op is Op.REDUCE and self.updates > 1:
                update += 1
        return found

    def stage_microbatches(self, stage: int) -> range:
        """Return the micro-batches that pass through a stage."""
        copy = stage // self.depth
        return range(copy * self.microbatches // self.model_copies, (copy + 1) * self.microbatches // self.model_copies)


class StageDurations(NamedTuple):
    """Times of passes and messages on one stage, in any unit."""

    forward: float = 1.0
    input: float = 1.0  # first half of a backward
    weight: float = 1.0  # second half of a backward
    communication: float = 0.0  # time of one message


class Schedule(NamedTuple):
    """A published order of one step's computations.

    Attributes:
        name: name in a layout.
        source: the paper, and where in it.
        orders: function of (pipeline ranks, micro-batches, stages per rank) that returns each rank's computations in
            order. In an asynchronous schedule the orders include each stage's STEPs.
        placement: function of (pipeline ranks, stages per rank) that returns the rank of each stage.
        virtual: stages per rank, None if the user chooses.
        model_copies: number of model copies.
        refuses: function of (pipeline ranks, micro-batches, stages per rank) that returns why they are unsupported, or
            "".
        order: function of (rank, pipeline ranks, micro-batches, stages per rank) that returns the order of one rank, if
            it can be written independently of the other ranks.
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
    schedule: Schedule, ranks: PositiveInt, microbatches: PositiveInt, *, virtual_stages: PositiveInt = 1,
    zero: int = 0, sequence_slices: PositiveInt = 1, transfers: bool = True, paired: bool = False,
) -> Program:  # fmt: skip
    """Build the program of a schedule.

    Args:
        ranks: pipeline ranks.
        virtual_stages: stages per rank, for schedules that leave it open.
        sequence_slices: number of slices per sequence.
        zero: ZeRO stage: 1 and 2 gather the parameters after the step; 3 gathers them layer by layer inside the passes.
        transfers: include transfers between ranks; simulation does not need them.
        paired: see `Program`.

    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> program = build_program(SCHEDULES["1f1b"], ranks=2, microbatches=2)
    >>> [str(action) for action in program.actions[1]][:3]
    ['1RF0', '1F0', '1RF1']
    """
    virtual = schedule.virtual or virtual_stages
    stage_rank = schedule.placement(ranks, virtual)
    orders = [_cut(order, sequence_slices) for order in schedule.orders(ranks, microbatches, virtual)]
    program = Program(
        ((),) * ranks, stage_rank, microbatches, gathers=zero in (1, 2), model_copies=schedule.model_copies,
        sequence_slices=sequence_slices, updates=max(1, sum(a.op is Op.STEP for a in orders[0])),
        paired=paired,
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
    """Insert reductions before and gathers after each update; without updates, add one of all stages at the end.

    That update takes the stages in the model's order, so that the ranks of two copies synchronise at each.
    """
    if program.updates > 1:
        around = (Op.REDUCE, Op.STEP, Op.GATHER) if program.gathers else (Op.REDUCE, Op.STEP)
        ops = {Op.STEP: around}
        return [action._replace(op=op) for action in order for op in ops.get(action.op, (action.op,))]
    stages = sorted(program.rank_stages(rank), key=lambda stage: stage % program.depth)
    reduces, gathers = ([Action(op, stage) for stage in stages] for op in (Op.REDUCE, Op.GATHER))
    return [*order, *reduces, Action(Op.STEP), *(gathers if program.gathers else ())]


def add_transfers(program: Program) -> Program:
    """Insert the sends and receives that the computations of a program need.

    A result is sent as soon as it is computed. A receive is posted one computation early, so that the transfer overlaps
    with computation. Messages between two ranks in one direction match by their order alone, so a rank posts its
    receives in the order in which the sender computes, some of them earlier than needed.
    """
    waiting: dict[tuple[Op, int, int], deque[Action]] = defaultdict(deque)  # receives, by op and both ranks
    for rank, order in enumerate(program.actions):
        for action in order:
            if receive := _received_as(action, program):
                waiting[receive.op, rank, program.stage_rank[receive.stage]].append(receive)
    posted: set[Action] = set()

    def post(action: Action) -> Iterator[Action]:
        needed = find_receive(action, program)
        if needed is None:
            return
        source, target = program.stage_rank[matching_send(needed).stage], program.stage_rank[needed.stage]
        queue = waiting[needed.op, source, target]
        while queue and needed not in posted:
            posted.add(queue[0])
            yield queue.popleft()

    def with_transfers(order: Sequence[Action]) -> Iterator[Action]:
        passes = [action for action in order if action.op in COMPUTE]
        following = dict(pairwise(passes))
        for first in passes[:1]:
            yield from post(first)
        for together in pair_up(order) if program.paired else zip(order):
            for action in together:
                if action in following:
                    yield from post(following[action])
            yield from together
            for action in together:
                yield from find_sends(action, program)

    return replace(program, actions=tuple(tuple(with_transfers(order)) for order in program.actions))


def pair_up(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Group actions: a forward with a full backward of another stage that follows it, every other action alone.

    Each of a pair hides the other's communication (DeepSeek-AI 2024, section 3.2.1).

    >>> F, B = Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 3, 0)
    >>> [len(together) for together in pair_up([F, B, B, F])]
    [2, 1, 1]
    """
    last: Action | None = None
    for action in actions:
        if last is not None:
            if last.op is Op.FORWARD and action.op is Op.BACKWARD and last.stage != action.stage:
                yield last, action
                last = None
                continue
            yield (last,)
        last = action
    if last is not None:
        yield (last,)


def backward_follows(actions: Iterable[Action], stage: int) -> bool:
    """Return whether each forward of a stage is directly followed by the backward of the same micro-batch."""
    order = [action.op for action in actions if action.stage == stage and action.op in FORWARDS | BACKWARDS]
    return all((op in FORWARDS) == (i % 2 == 0) for i, op in enumerate(order))


def find_receive(action: Action, program: Program) -> Action | None:
    """Return the receive that a computation needs from another rank, or None."""
    return _message(action, action.stage, program)


def matching_send(receive: Action) -> Action:
    forward = receive.op is Op.RECV_FORWARD
    op, other = (Op.SEND_FORWARD, -1) if forward else (Op.SEND_BACKWARD, 1)
    return receive._replace(op=op, stage=receive.stage + other)


def find_sends(action: Action, program: Program) -> list[Action]:
    """Return the sends to other ranks that follow a computation."""
    receive = _received_as(action, program)
    return [matching_send(receive)] if receive else []


def _received_as(action: Action, program: Program) -> Action | None:
    """Return the receive, on another rank, of a computation's result."""
    return _message(action, action.stage + (1 if action.op in FORWARDS else -1), program)


def _message(action: Action, target: int, program: Program) -> Action | None:
    """Return the receive of a pass's input or result at the stage that it goes to; None within a rank."""
    if action.op not in FORWARDS | BACKWARDS:
        return None
    op, source = (Op.RECV_FORWARD, target - 1) if action.op in FORWARDS else (Op.RECV_BACKWARD, target + 1)
    same_copy = source // program.depth == target // program.depth  # -1 and `stages` belong to none
    far = same_copy and program.stage_rank[source] != program.stage_rank[target]
    return Action(op, target, action.microbatch, action.part) if far else None
