"""Event simulation of programs: start and end of each action and message, for many sets of durations together.

Events lie on lanes. A rank is a lane of actions; a link (from one rank to another) is a lane of messages. An event
starts when the previous one on its lane has ended and the one that it waits for has arrived. The order of events
depends only on the orders of actions, not on durations. So the events are sorted once into sweeps, each of which
advances every ready lane by one event. A simulation then computes one sweep at a time, as [events, sets] arrays. The
number of sweeps is the longest chain of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shoal.pipeline.program import Program, ProgramError
from shoal.pipeline.simulator.columns import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT,
    OPS,
    REDUCE,
    STEP,
    WEIGHT,
    Columns,
    build_columns,
)
from shoal.pipeline.simulator.times import MessageTimes

NOTHING = -1
SHOWN = 8  # maximum ranks named in a message about a deadlock


class Player:
    """A program whose events are sorted into sweeps. The events are the rows of its columns, then its messages.

    Args:
        program: computations in each rank's order. Results leave where the program sends them, or as soon as they are
            computed if it has no sends. A receive is not an event: every message has a buffer.
        blocking: a message also occupies its sender.
        paired: a forward and the next backward end together if they can be computed together.
        tied: the first and the last stage share an embedding, and so wait for each other's gradients at each update of
            an asynchronous program.

    Raises:
        ProgramError: a result is missing, repeated or on the wrong rank, or ranks wait for each other.
    """

    def __init__(
        self, program: Program | Columns, *, blocking: bool = False, paired: bool = False, tied: bool = False
    ):
        self.columns = program if isinstance(program, Columns) else build_columns(program)
        self.pairs = self.columns.pairs if paired else np.empty(0, np.int64)
        sent_after = self.columns.sent_after.copy()
        sent_after[self.pairs] = np.maximum(sent_after[self.pairs], self.pairs + 1)
        self.messages = _messages(self.columns, sent_after)  # [2, messages] rows of producers and consumers
        rows, events = self.columns.rows, self.columns.rows + self.messages.shape[1]
        waits_for = np.full(events, NOTHING, np.int32)
        waits_for[rows:] = sent_after[self.messages[0]]
        waits_for[self.messages[1]] = np.arange(rows, events)
        before = self._before(waits_for, blocking)
        _meet(self.columns, waits_for, before, tied)
        self._sort(waits_for, before)

    def _before(self, waits_for: np.ndarray, blocking: bool) -> np.ndarray:
        """Return the previous event on the lane of each event, or NOTHING. [events]"""
        columns, rows = self.columns, self.columns.rows
        before = np.arange(-1, len(waits_for) - 1, dtype=np.int32)
        begins = columns.offset[:-1]
        before[begins[begins < rows]] = NOTHING
        if not blocking:
            source, target = columns.rank[self.messages]
            before[rows:][np.flatnonzero(np.diff(source, prepend=-1) | np.diff(target, prepend=-1))] = NOTHING
            return before
        last = np.arange(rows)  # on a rank's lane: the row, or the last message after it
        for message, row in enumerate(waits_for[rows:].tolist(), rows):
            before[message], last[row] = last[row], message
        later = np.flatnonzero(before[:rows] != NOTHING)
        before[later] = last[later - 1]
        return before

    def _sort(self, waits_for: np.ndarray, before: np.ndarray) -> None:
        """Sort the events into sweeps, and find the positions of each event's predecessors in that order."""
        events = len(before)
        never, always = events, events + 1  # a lane that has ended waits for `never`; `always` has arrived
        following = np.full(events, never, np.int32)
        linked = np.flatnonzero(before != NOTHING)
        following[before[linked]] = linked
        needed = np.append(np.where(waits_for == NOTHING, always, waits_for), never).astype(np.int32)
        done = np.zeros(events + 2, bool)
        done[always] = True
        head, sweeps = np.flatnonzero(before == NOTHING).astype(np.int32), []
        while len(event := head[ready := done[needed[head]]]):
            sweeps.append(event)
            done[event] = True
            head[ready] = following[event]
        order = np.concatenate([*sweeps, np.empty(0, np.int32)])
        if len(order) < events:
            raise ProgramError(self._deadlock(head[head < self.columns.rows]))
        self.order = order  # [events] by sweep
        self.place = np.empty(events + 1, np.int32)  # [events + 1] positions in that order; the last is NOTHING's
        self.place[order], self.place[NOTHING] = np.arange(events), events
        self.previous, self.needed = self.place[before[order]], self.place[waits_for[order]]
        self.sweeps = [slice(*cut) for cut in pairwise(np.cumsum([0, *map(len, sweeps)]).tolist())]

    def _deadlock(self, heads: np.ndarray) -> str:
        rank = self.columns.rank
        stuck = [f"pipeline rank {rank[row]} waits at {self.columns.action(row)}" for row in np.sort(heads).tolist()]
        return "deadlock: " + "; ".join(stuck[:SHOWN]) + (" ..." if len(stuck) > SHOWN else "")

    def play(self, duration: np.ndarray, latency: np.ndarray, *, together: bool = False) -> np.ndarray:
        """Simulate the step: start, end and arrival of each event. [3, events, sets]

        Args:
            duration: [events, sets] time that each event occupies its lane.
            latency: [events, sets] time from its end to its arrival.
            together: the sets are replicas, which synchronise at each reduction and gather; otherwise they are
                independent.
        """
        return self._advance(duration, latency, together=together)[:, self.place[:-1]]

    def _advance(self, duration: np.ndarray, latency: np.ndarray, *, together: bool = False) -> np.ndarray:
        """Compute the times in sweep order; the last event has always arrived. [3, events + 1, sets]"""
        duration, latency = duration[self.order], latency[self.order]
        meets = np.isin(self.columns.op, (REDUCE, GATHER))
        meets = np.append(meets, np.zeros(self.messages.shape[1], bool))[self.order]
        start, end, arrival = played = np.zeros((3, len(self.order) + 1, duration.shape[1]))
        for sweep in self.sweeps:
            begin = np.maximum(end[self.previous[sweep]], arrival[self.needed[sweep]], out=start[sweep])
            if together and np.any(met := meets[sweep]):
                begin[met] = begin[met].max(axis=1, keepdims=True)
            np.add(begin, duration[sweep], out=end[sweep])
            np.add(end[sweep], latency[sweep], out=arrival[sweep])
        return played

    # ---- entry point of the search -------------------------------------------------------------------------------

    def step_times(self, times: np.ndarray, links: Sequence[MessageTimes]) -> np.ndarray:
        """Return the step time of each set: from the start to the end of the last action. [sets]

        Args:
            times: [7, stages, sets] times of forwards, input halves and weight halves of backwards, reductions, steps,
                gathers, and pairs (by the forward's stage; unused if nothing is paired).
            links: message times of each set, equal for all its links; not blocking.
        """
        columns = self.columns
        table = np.zeros((len(OPS), *times.shape[1:]))
        table[[FORWARD, INPUT, WEIGHT, REDUCE, STEP, GATHER]], paired = times[:6], times[6]
        table[BACKWARD] = table[INPUT] + table[WEIGHT]
        duration, latency = np.zeros((2, len(self.order), times.shape[2]))
        duration[: columns.rows] = table[columns.op, columns.stage]
        duration[self.pairs], duration[self.pairs + 1] = 0.0, paired[columns.stage[self.pairs]]
        duration[columns.rows :] = [link.time for link in links]
        latency[columns.rows :] = [link.latency for link in links]
        _, end, _ = self._advance(duration, latency)
        last: np.ndarray = end.max(axis=0)
        return last


# ---- dependencies --------------------------------------------------------------------------------------------------


def _messages(columns: Columns, sent_after: np.ndarray) -> np.ndarray:
    """Return the producer and consumer rows of each message, ordered by link and then by sending time. [2, messages]"""
    program = columns.program
    # Row that computes each result, or NOTHING. [forward or backward, stages, micro-batches, parts]
    made = np.full((2, program.stages, program.microbatches, program.sequence_slices), NOTHING, np.int32)
    pairs = []
    for kind, codes, step in ((0, (FORWARD,), -1), (1, (BACKWARD, INPUT), 1)):
        consumer = np.flatnonzero(np.isin(columns.op, codes))
        stage, rest = columns.stage[consumer], (columns.microbatch[consumer], np.maximum(columns.part[consumer], 0))
        made[kind, stage, *rest] = consumer
        if np.any(again := made[kind, stage, *rest] != consumer):
            raise ProgramError(f"{columns.action(int(consumer[again][0]))} is computed more than once")
        if columns.ranks and np.any(wrong := np.asarray(program.stage_rank)[stage] != columns.rank[consumer]):
            row = int(consumer[wrong][0])
            action, rank = columns.action(row), columns.rank[row]
            raise ProgramError(f"{action} is computed on pipeline rank {rank}, not its stage's")
        inner = stage % program.depth != (0 if step < 0 else program.depth - 1)
        consumer, stage, rest = consumer[inner], stage[inner], (rest[0][inner], rest[1][inner])
        producer = made[kind, stage + step, *rest]
        if np.any(missing := producer == NOTHING):
            action = columns.action(int(consumer[missing][0]))
            raise ProgramError(f"{action} waits for stage {action.stage + step}, which never computes it")
        pairs.append((producer, consumer))
    producer, consumer = np.concatenate(pairs, axis=1)
    rank = columns.rank
    source, target = rank[producer], rank[consumer]
    if np.any(late := (source == target) & (producer > consumer)):
        row = int(consumer[late][0])
        raise ProgramError(f"pipeline rank {rank[row]}: {columns.action(row)} comes before what it needs")
    far = np.flatnonzero(source != target)
    order = far[np.lexsort((producer[far], sent_after[producer[far]], target[far], source[far]))]
    return np.stack((producer[order], consumer[order])).astype(np.int32)


def _meet(columns: Columns, waits_for: np.ndarray, before: np.ndarray, tied: bool) -> None:
    """Add waits without messages: between two copies of a stage, and between the two ends of a tied model."""
    program, op, stage = columns.program, columns.op, columns.stage

    def select_rows(code: int, which: int) -> np.ndarray:
        return np.flatnonzero((op == code) & (stage == which))

    if program.model_copies == 2:
        for part in range(program.depth):
            for code in (REDUCE, GATHER):
                for one, other in zip(select_rows(code, part), select_rows(code, part + program.depth), strict=False):
                    waits_for[one], waits_for[other] = before[other], before[one]
    if tied and program.updates > 1:
        for one, other in ((0, program.depth - 1), (program.depth - 1, 0)):
            for step, reduction in zip(select_rows(STEP, one), select_rows(REDUCE, other), strict=False):
                waits_for[step] = reduction
