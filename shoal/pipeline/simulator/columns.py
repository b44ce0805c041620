"""A program as arrays (one column per field), used to simulate millions of actions.

A row is an action that occupies a rank: a computation, reduction, update or gather. Transfers have no rows: they follow
from the computations, and a row only stores after which other row its result is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.pipeline.program import BACKWARDS, FORWARDS, SENDS, Action, Op, Program, ProgramError

OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.REDUCE, Op.STEP, Op.GATHER)
CODE = {op: code for code, op in enumerate(OPS)}
ALL = {op: CODE.get(op, len(OPS)) for op in Op}  # including transfers
FORWARD, BACKWARD, INPUT, WEIGHT, REDUCE, STEP, GATHER = range(len(OPS))
COMPUTING = WEIGHT  # the codes up to here are computations

NTH = 3  # micro-batches that `live_before_backwards` distinguishes: the first, the second, and all later ones
NONE, SOME, EVERY = range(3)  # how many of a rank's other stages last ran a forward
HISTORY_SHAPE = (4, NTH, NTH, 2, 3)  # same shape as `shoal.planning.cost.memory.stage.TIMES`

Integers = np.ndarray  # [rows], integers


@dataclass(frozen=True)
class Columns:
    """The rows of all ranks, ordered by rank."""

    program: Program  # program of the rows; its `actions` may be empty
    offset: Integers  # [ranks + 1] first row of each rank; the last entry is the number of rows
    op: Integers  # [rows] indices into `OPS`
    stage: Integers  # [rows] -1 for all stages of the rank
    microbatch: Integers  # [rows] -1 where not applicable
    part: Integers  # [rows] slice of the sequence, -1 for all of it
    version: Integers  # [rows] weight version, -1 if only one exists
    # [rows] the row after which this one's result is sent; itself if the program does not specify it
    sent_after: Integers

    @property
    def ranks(self) -> int:
        return len(self.offset) - 1

    @property
    def rows(self) -> int:
        return len(self.op)

    @property
    def rank(self) -> Integers:
        """[rows] Pipeline rank of each row."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.offset))

    @property
    def pairs(self) -> Integers:
        """Rows of forwards that can run together with the next row, a full backward of another stage.

        Each of the two hides the other's communication (DeepSeek-AI 2024, section 3.2.1).
        """
        follows = (self.op[:-1] == FORWARD) & (self.op[1:] == BACKWARD) & (self.stage[:-1] != self.stage[1:])
        follows[self.offset[1:-1] - 1] = False
        return np.flatnonzero(follows)

    @cached_property
    def history(self) -> Integers:
        """[4, rows] History before each row, by which `live_before_backwards` groups rows.

        The entries are: micro-batches whose weight gradients the row's stage has computed; the same for the rank's
        other stages; whether the stage's previous pass was a forward; for how many of the other stages it was one.
        """
        made = (self.op == BACKWARD) | (self.op == WEIGHT)
        order = np.argsort(self.stage, kind="stable")
        op, stage = self.op[order], self.stage[order]
        passes = (op == FORWARD) | (op == BACKWARD) | (op == INPUT)
        last = np.append(-1, np.maximum.accumulate(np.where(passes, np.arange(self.rows), -1))[:-1])
        over, after, change = np.empty((3, self.rows), int)
        over[order] = _counted(made[order], stage)
        after[order] = (last >= 0) & (op[last] == FORWARD) & (stage[last] == stage)
        change[order] = passes * ((op == FORWARD) - after[order])
        of_others, after_others = _counted(made, self.rank) - over, _counted(change, self.rank) - after
        several = np.bincount(self.program.stage_rank)[self.rank] - 1
        every = (after_others > 0) & (after_others == several)
        nth = np.minimum(np.stack([over, of_others]) // self.program.sequence_slices, NTH - 1)
        return np.concatenate([nth, [after, np.minimum(after_others, SOME) + every]])

    def activation_changes(self, full: float | np.ndarray, half: float | np.ndarray | None = None) -> np.ndarray:
        """Return the change in activation memory of the rank at each row. [rows] A slice counts as its share.

        Args:
            full: bytes stored by a micro-batch's forward, a number or [stages].
            half: bytes that remain between the halves of its backward, in the same form; None for all.
        """
        given = (full, full if half is None else half)
        full, half = (np.broadcast_to(np.asarray(one, float), self.program.stages) for one in given)
        change = np.zeros(self.rows)
        for code, by_stage in ((FORWARD, full), (BACKWARD, -full), (INPUT, half - full), (WEIGHT, -half)):
            rows = self.op == code
            change[rows] = by_stage[self.stage[rows]]
        change[self.part >= 0] /= self.program.sequence_slices
        return change

    def peak_bytes(
        self, activation: float | np.ndarray, kept_for_weight: float | np.ndarray | None = None
    ) -> np.ndarray:
        """Return the peak activation memory of each rank. [ranks]

        Args:
            activation: bytes stored by a micro-batch's forward (M_B), or an array [stages].
            kept_for_weight: bytes that remain between the two halves of its backward (M_W); None for all.
        """
        change = self.activation_changes(activation, kept_for_weight)
        return np.array([np.cumsum(rank).max(initial=0.0) for rank in np.split(change, self.offset[1:-1])])

    def action(self, row: int) -> Action:
        numbers = (self.stage, self.microbatch, self.part, self.version)
        return Action(OPS[self.op[row]], *(int(column[row]) for column in numbers))


def build_columns(program: Program) -> Columns:
    """Build the columns of a program. Each result is sent where the program sends it."""
    parts, offset = [], [0]
    for order in program.actions:
        parts.append(_rank(order, offset[-1]))
        offset.append(offset[-1] + len(parts[-1][0]))
    return Columns(program, np.array(offset), *(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rank(order: Sequence[Action], base: int) -> tuple[Integers, ...]:
    """Build one rank's columns, starting at row `base`."""
    if not order:
        return (np.empty(0, np.int8), *(np.empty(0, np.int32) for _ in range(5)))
    ops, *numbers = zip(*order, strict=True)
    op = np.fromiter(map(ALL.get, ops), np.int8, len(order))
    own = np.flatnonzero(op < len(OPS))
    columns = [np.fromiter(number, np.int32, len(order))[own] for number in numbers]
    sent_after = np.arange(base, base + len(own), dtype=np.int32)
    if len(own) < len(order):
        _move_sends(order, sent_after, base)
    return op[own], *columns, sent_after


def _move_sends(order: Sequence[Action], sent_after: Integers, base: int) -> None:
    made: dict[tuple[bool, int, int, int], int] = {}
    passed = -1
    for action in order:
        what = action[1:4]
        if action.op in CODE:
            passed += 1
            if action.op in FORWARDS | BACKWARDS:
                made[action.op in FORWARDS, *what] = passed
        elif action.op in SENDS:
            if (row := made.get((action.op is Op.SEND_FORWARD, *what))) is None:
                raise ProgramError(f"{action} sends what its rank has not computed yet: prove the program first")
            sent_after[row] = base + passed


def live_before_backwards(
    columns: Columns, full: Sequence[float] | np.ndarray, half: Sequence[float] | np.ndarray, passing: float
) -> np.ndarray:
    """Return the peak activation memory of a stage's rank by kind of pass and history. [216, stages]

    Memory is counted at the start of a backward (kind 0), of its first half (1) and of its second (2), and at the end
    of a forward (3). The history is `Columns.history`: the micro-batches (0, 1, more) that the stage has finished, and
    that the rank's other stages have; whether the stage's previous pass was a forward, and for how many of the other
    stages it was (none, some, all). The flat first axis has the shape `HISTORY_SHAPE`; -inf marks an impossible case.

    Messages count too, except the ones that the pass has consumed: the one that the next pass waits for
    (`add_transfers`), a gradient if it was sent last, and messages between two stages of this rank.

    Args:
        full: [stages] bytes stored by a micro-batch's forward.
        half: [stages] bytes that remain between the halves.
        passing: bytes of a message between two stages. Two consecutive stages on one rank share one buffer.
    """
    holder, stages = np.array(columns.program.stage_rank), columns.program.stages
    follows = np.arange(stages) % columns.program.depth > 0
    near = follows & np.append(False, holder[1:] == holder[:-1])
    change = columns.activation_changes(np.array(full) - passing * near, np.array(half))
    messages = passing * _messages(columns, near, follows & ~near)
    messages[columns.part >= 0] /= columns.program.sequence_slices
    before = _sums(change, columns) - np.where(columns.op == FORWARD, 0.0, change) + messages
    found = np.full((*HISTORY_SHAPE, stages), -np.inf)
    for i, code in enumerate((BACKWARD, INPUT, WEIGHT, FORWARD)):
        rows = columns.op == code
        np.maximum.at(found[i], (*columns.history[:, rows], columns.stage[rows]), before[rows])
    return found.reshape(-1, stages)


def _messages(columns: Columns, near: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Return the number of messages that a rank holds during a pass, except those that the pass has consumed. [rows]

    Args:
        near, far: [stages] whether the previous stage is on the same rank, and whether it is on another.
    """
    stage, forward = columns.stage, columns.op == FORWARD
    backward = (columns.op == BACKWARD) | (columns.op == INPUT)
    next_near, next_far = (np.append(of[1:], False) for of in (near, far))
    found = np.zeros(columns.rows)
    passes = np.flatnonzero(columns.op <= COMPUTING)
    comes = (forward & far[stage] | backward & next_far[stage])[passes]
    same = columns.rank[passes[1:]] == columns.rank[passes[:-1]]
    found[passes[:-1]] += comes[1:] & same
    # Count the last message sent: for a forward, the stage already keeps it, or nothing.
    sent = forward * -next_far[stage].astype(int) + backward * far[stage]
    sends = np.maximum.accumulate(np.where(sent != 0, np.arange(columns.rows), -1))
    sends = np.append(-1, sends[:-1])
    found += (sends >= columns.offset[columns.rank]) & (sent[sends] > 0)
    made, taken = backward & near[stage], backward & next_near[stage]
    total: np.ndarray = found + _sums(made.astype(int) - taken, columns) - made
    return total


def _sums(numbers: np.ndarray, columns: Columns) -> np.ndarray:
    """Return running sums within each rank. [rows]"""
    return np.concatenate([np.cumsum(rank) for rank in np.split(numbers, columns.offset[1:-1])])


def _counted(made: np.ndarray, of: Integers) -> Integers:
    """Sum over earlier rows of the same group; rows of a group are adjacent."""
    before = np.cumsum(made) - made
    begins = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
    counted: Integers = before - np.repeat(before[begins], np.diff(np.append(begins, len(of))))
    return counted
