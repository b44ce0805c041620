"""Plays a program: every rank in its own order, every message on its link, each as soon as what it needs is there.

The events are nodes on lanes. A rank is a lane of computations; a link (one rank to one other) is a lane of messages. A
node begins when the one before it on its lane has ended and the one it waits for has arrived, so the play is fixed by
the orders and no queue of future events is needed. All lanes advance together, one node each a sweep, in arrays: the
number of sweeps is the longest chain of events, not their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import Program
from shoal.pipeline.simulator.columns import BACKWARD, FORWARD, GATHER, INPUT, REDUCE, Columns, of_program
from shoal.pipeline.simulator.disturbance import DistinctReplicas, Disturbance, different_replicas
from shoal.pipeline.simulator.timeline import Messages, Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

NOTHING = -1


def simulate(
    program: Program | Columns,
    times: ActionTimes | None = None,
    links: MessageTimes | None = None,
    *,
    disturbance: Disturbance | None = None,
    dp: int = 1,
    tp: int = 1,
) -> Timeline:
    """Play one step.

    Args:
        program: its computations in each rank's order. Where it sends, results leave there, otherwise as soon as they
            are made. A receive is no event of its own: a buffer waits for every message.
        times: of the actions; all computations take 1 where not given, and what follows them nothing.
        links: times of the messages; nothing where not given.
        disturbance: slow ranks and links, noise.
        dp: replicas of the pipeline, which meet at each REDUCE and GATHER. Those that do not differ are played once.
        tp: ranks that each replica's pipeline rank is made of, which move together.

    Raises:
        UsageError: the times do not fit the program, the disturbance not the world, or the program is wrong: a
            result that nobody makes, or ranks that wait for each other.

    >>> from shoal.pipeline.program import build_program
    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> timeline = simulate(build_program(SCHEDULES["zb-h1"], ranks=4, microbatches=8))
    >>> float(timeline.step_time), timeline.peak_live.tolist()
    (27.0, [4.0, 4.0, 4.0, 4.0])
    """
    columns = program if isinstance(program, Columns) else of_program(program)
    times, links, disturbance = times or ActionTimes(), links or MessageTimes(), disturbance or Disturbance()
    pairs = columns.pairs if times.pair is not None else np.empty(0, np.int64)
    if len(pairs):
        columns = _sent_together(columns, pairs)
    replicas = different_replicas(disturbance, columns.ranks, dp, tp)
    messages = messages_of(columns)
    graph = EventGraph.of(columns, messages, times, links, disturbance, replicas)
    start, arrival = _play(graph, columns)
    return _timeline(columns, pairs, replicas, messages, graph, start, arrival)


def _sent_together(columns: Columns, pairs: np.ndarray) -> Columns:
    """A forward that is computed at once with the backward behind it sends no earlier than that."""
    sent_after = columns.sent_after.copy()
    sent_after[pairs] = np.maximum(sent_after[pairs], pairs + 1)
    return replace(columns, sent_after=sent_after)


# ---- what waits for what ----------------------------------------------------------------------------------------


def messages_of(columns: Columns) -> np.ndarray:
    """Producer and consumer of each message, link after link, in the order in which it is sent. [2, messages] rows"""
    table = _producers(columns)
    of_first = _needed(columns, table, passes=(FORWARD,), kind=0, step=-1)
    of_last = _needed(columns, table, passes=(BACKWARD, INPUT), kind=1, step=1)
    consumer, producer = np.concatenate((of_first, of_last), axis=1)
    placement = np.asarray(columns.program.stage_rank)
    source, target = placement[columns.stage[producer]], placement[columns.stage[consumer]]
    near = source == target
    if np.any(late := near & (producer > consumer)):
        row = int(consumer[late][0])
        raise UsageError(f"pipeline rank {source[late][0]}: {columns.action(row)} comes before what it needs")
    far = np.flatnonzero(~near)
    source, target, producer, consumer = source[far], target[far], producer[far], consumer[far]
    order = np.lexsort((producer, columns.sent_after[producer], target, source))
    return np.stack((producer[order], consumer[order])).astype(np.int32)


def _producers(columns: Columns) -> np.ndarray:
    """The row that computes each result. [forward or backward, stages, micro-batches, parts], NOTHING where none"""
    program = columns.program
    table = np.full((2, program.stages, program.microbatches, program.parts), NOTHING, np.int32)
    for kind, codes in enumerate(((FORWARD,), (BACKWARD, INPUT))):
        rows = np.flatnonzero(np.isin(columns.op, codes))
        where = (kind, columns.stage[rows], columns.microbatch[rows], np.maximum(columns.part[rows], 0))
        table[where] = rows
        if len(rows) > np.count_nonzero(table[kind] != NOTHING):
            again = rows[table[where] != rows][0]
            raise UsageError(f"{columns.action(int(again))} is computed more than once")
        if columns.ranks and np.any(wrong := np.asarray(program.stage_rank)[where[1]] != columns.rank[rows]):
            row = int(rows[wrong][0])
            raise UsageError(f"{columns.action(row)} is computed on pipeline rank {columns.rank[row]}, not its stage's")
    return table


def _needed(columns: Columns, table: np.ndarray, passes: tuple[int, ...], kind: int, step: int) -> np.ndarray:
    """Consumers of a direction and the producers of what they take in. [2, consumers] rows"""
    depth = columns.program.depth
    end = 0 if step < 0 else depth - 1
    rows = np.flatnonzero(np.isin(columns.op, passes))
    rows = rows[columns.stage[rows] % depth != end]
    made = table[kind, columns.stage[rows] + step, columns.microbatch[rows], np.maximum(columns.part[rows], 0)]
    if np.any(made == NOTHING):
        row = int(rows[made == NOTHING][0])
        raise UsageError(f"{columns.action(row)} waits for stage {columns.stage[row] + step}, which never computes it")
    return np.stack((rows, made))


@dataclass(frozen=True)
class EventGraph:
    """Nodes: the rows of each kind of replica, then their messages, then what the kinds meet at.

    Attributes:
        first: [lanes] the first node of each lane.
        next: [nodes] the node behind each on its lane, NOTHING behind the last.
        waits_for: [nodes] the node that must have arrived, or NOTHING.
        duration: [nodes] time on the lane.
        latency: [nodes] from the end on the lane to the arrival.
        rows: how many nodes are rows.
    """

    first: np.ndarray
    next: np.ndarray
    waits_for: np.ndarray
    duration: np.ndarray
    latency: np.ndarray
    rows: int

    @staticmethod
    def of(
        columns: Columns,
        messages: np.ndarray,
        times: ActionTimes,
        links: MessageTimes,
        disturbance: Disturbance,
        replicas: DistinctReplicas,
    ) -> EventGraph:
        kinds, rows, sent = len(replicas.count), columns.rows, messages.shape[1]
        meetings = _meetings(columns, kinds)
        nodes = kinds * (rows + sent) + meetings.shape[1]
        following = np.arange(1, nodes + 1, dtype=np.int32)
        waits_for = np.full(nodes, NOTHING, np.int32)
        duration, latency = np.zeros(nodes), np.zeros(nodes)
        first = [_lanes(following, columns.offset[:-1] + kind * rows, columns.offset[1:] + kind * rows)
                 for kind in range(kinds)]  # fmt: skip

        rank = columns.rank
        source, target = rank[messages[0]], rank[messages[1]]
        change = np.flatnonzero(np.diff(source) | np.diff(target)) + 1
        begins, ends = np.concatenate(([0], change)), np.concatenate((change, [sent]))
        time, flight = links.between(source, target)
        base = times.of(columns)
        random = np.random.default_rng(disturbance.seed) if disturbance.jitter else None  # numpy loads it on use
        own = ~np.isin(columns.op, (REDUCE, GATHER))  # what a rank does alone
        for kind in range(kinds):
            at, to = kind * rows, kinds * rows + kind * sent
            factors = replicas.compute[kind][rank]
            if random is not None:
                factors = factors * _noise(random, disturbance.jitter, rows)
            duration[at : at + rows] = np.where(own, base * factors, base)
            factor = _link_factors(replicas.links[kind], source, target, columns.ranks)
            duration[to : to + sent], latency[to : to + sent] = time * factor, flight * factor
            numbers = np.arange(to, to + sent, dtype=np.int32)
            waits_for[numbers] = columns.sent_after[messages[0]] + at
            waits_for[messages[1] + at] = numbers
            if sent and links.blocking:
                _hold_sender(following, numbers, waits_for[numbers])
            elif sent:
                first.append(_lanes(following, begins + to, ends + to))
        if meetings.size:
            first.append(_meet(following, waits_for, meetings, kinds * (rows + sent)))
        return EventGraph(np.concatenate(first), following, waits_for, duration, latency, kinds * rows)


def _lanes(following: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Cut a lane behind each end; the first node of each."""
    following[ends[ends > begins] - 1] = NOTHING
    return begins[ends > begins].astype(np.int32)


def _hold_sender(following: np.ndarray, messages: np.ndarray, behind: np.ndarray) -> None:
    """Put messages on their senders' lanes, behind what they wait for. Several behind one keep their order."""
    for message, row in zip(messages[::-1], behind[::-1], strict=True):
        following[message] = following[row]
        following[row] = message


def _meetings(columns: Columns, kinds: int) -> np.ndarray:
    """Where replicas and copies of the model must all have come before any goes on.

    [3, nodes]: which meeting, in the order in which a part of the model has them; the place of the lane; the row. Empty
    with one replica kind and one copy.
    """
    if kinds * columns.program.copies == 1:
        return np.empty((3, 0), np.int64)
    rows = np.flatnonzero((columns.op == REDUCE) | (columns.op == GATHER))
    part = columns.stage[rows] % columns.program.depth
    group = columns.op[rows].astype(np.int64) * columns.program.depth + part
    turn = np.zeros(len(rows), np.int64)  # the how many-th of its stage
    stage = columns.op[rows].astype(np.int64) * columns.program.stages + columns.stage[rows]
    for one in np.flatnonzero(np.bincount(stage)):  # numpy's unique first imports its masked arrays
        turn[stage == one] = np.arange(np.count_nonzero(stage == one))
    turns = int(turn.max(initial=0)) + 1
    rows = np.concatenate([rows + kind * columns.rows for kind in range(kinds)])
    meeting = np.tile(group * turns + turn, kinds)
    order = np.argsort(meeting, kind="stable")
    return np.stack((meeting[order], np.tile(group, kinds)[order], rows[order]))


def _meet(following: np.ndarray, waits_for: np.ndarray, meetings: np.ndarray, base: int) -> np.ndarray:
    """Lanes of arrivals: each waits for what comes before a row that meets, and all these rows for the last arrival."""
    meeting, lane, rows = meetings
    numbers = np.arange(base, base + len(rows), dtype=np.int32)
    before = np.full(base, NOTHING, np.int32)
    linked = np.flatnonzero(following[:base] != NOTHING)
    before[following[linked]] = linked
    waits_for[numbers] = before[rows]
    last = np.searchsorted(meeting, meeting, side="right") - 1
    waits_for[rows] = numbers[last]
    change = np.flatnonzero(np.diff(lane)) + 1
    begins, ends = np.concatenate(([0], change)), np.concatenate((change, [len(rows)]))
    return _lanes(following, begins + base, ends + base)


def _link_factors(
    slow: Mapping[tuple[int, int], float], source: np.ndarray, target: np.ndarray, ranks: int
) -> np.ndarray | float:
    if not slow:
        return 1.0
    factor = np.ones((ranks, ranks))
    for pair, value in slow.items():
        factor[pair] = value
    factors: np.ndarray = factor[source, target]
    return factors


def _noise(random: np.random.Generator, deviation: float, n: int) -> np.ndarray:
    """Log-normal factors with mean 1."""
    variance = np.log1p(deviation**2)
    return random.lognormal(-variance / 2, np.sqrt(variance), n)


# ---- the play ---------------------------------------------------------------------------------------------------


def _play(graph: EventGraph, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """When each node begins, and when it has arrived. [nodes] each"""
    nodes = len(graph.next)
    never = nodes  # behind the last of each lane; it waits for itself
    following = np.where(graph.next == NOTHING, never, graph.next).astype(np.int32)
    waits_for = np.append(graph.waits_for, never).astype(np.int32)
    waits_for[waits_for == NOTHING] = nodes + 1  # which has arrived at 0
    start, arrival = np.zeros(nodes), np.full(nodes + 2, np.inf)
    arrival[-1] = 0.0
    head, clock, left = graph.first.copy(), np.zeros(len(graph.first)), nodes
    while left:
        needed = arrival[waits_for[head]]
        ready = np.flatnonzero(needed < np.inf)
        if not len(ready):
            raise UsageError(deadlock(head[head < graph.rows], columns))
        node = head[ready]
        begin = np.maximum(clock[ready], needed[ready])
        end = begin + graph.duration[node]
        start[node], clock[ready] = begin, end
        arrival[node] = end + graph.latency[node]
        head[ready] = following[node]
        left -= len(ready)
    return start, arrival[:nodes]


def deadlock(heads: np.ndarray, columns: Columns) -> str:
    waiting = [f"pipeline rank {columns.rank[row]} at {columns.action(row)}" for row in heads[:8] % columns.rows]
    return "deadlock, every rank waits for another: " + ", ".join(waiting) + (" ..." if len(heads) > 8 else "")


def _timeline(
    columns: Columns,
    pairs: np.ndarray,
    replicas: DistinctReplicas,
    messages: np.ndarray,
    graph: EventGraph,
    start: np.ndarray,
    arrival: np.ndarray,
) -> Timeline:
    kinds, sent = len(replicas.count), messages.shape[1]
    rank = columns.rank
    begin = start[: graph.rows].reshape(kinds, -1)
    end = begin + graph.duration[: graph.rows].reshape(kinds, -1)
    begin[:, pairs], end[:, pairs] = begin[:, pairs + 1], end[:, pairs + 1]
    there = slice(graph.rows, graph.rows + kinds * sent)
    return Timeline(
        columns=columns,
        replicas=replicas.count,
        start=begin,
        end=end,
        pairs=pairs,
        messages=Messages(
            source=rank[messages[0]],
            target=rank[messages[1]],
            producer=messages[0],
            consumer=messages[1],
            start=start[there].reshape(kinds, -1),
            end=arrival[there].reshape(kinds, -1),
        ),
    )
