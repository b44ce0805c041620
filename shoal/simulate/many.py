"""Plays one program with many sets of durations at once: what a search over layouts asks for.

Which event comes after which follows from the orders alone, not from how long anything takes. So the sweeps of
`shoal.simulate.engine` are found once for a program, and each advances all sets together: [events, sets] arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import UsageError
from shoal.simulate.columns import BACKWARD, FORWARD, GATHER, INPUT, REDUCE, STEP, WEIGHT, Columns
from shoal.simulate.disturbance import Disturbance, different_replicas
from shoal.simulate.engine import NOTHING, Graph, deadlock, messages_of
from shoal.simulate.times import Links, Times


class Replay:
    """A program whose events are in the order of their sweeps.

    Raises:
        UsageError: the program is wrong, as in `simulate`.
    """

    def __init__(self, columns: Columns):
        self.columns = columns
        messages = messages_of(columns)
        quiet = Disturbance()
        graph = Graph.of(columns, messages, Times(0, 0, 0), Links(), quiet, different_replicas(quiet, columns.ranks))
        self.rows, self.sent = columns.rows, messages.shape[1]
        self.sweeps = _Sweeps.of(graph, columns)

    def step_times(self, times: np.ndarray, links: Sequence[Links]) -> np.ndarray:
        """[sets] from the begin of the step to the end of its last action, as `simulate` has it.

        Args:
            times: [6, stages, sets] of forwards, of the halves of backwards for inputs and for weights, reductions,
                steps, gathers.
            links: one for all links of each set, not blocking.
        """
        columns, sweeps, sets = self.columns, self.sweeps, times.shape[2]
        table = np.zeros((7, times.shape[1], sets))
        table[[FORWARD, INPUT, WEIGHT, REDUCE, STEP, GATHER]] = times
        table[BACKWARD] = table[INPUT] + table[WEIGHT]
        duration, latency = np.zeros((2, len(sweeps.nodes) + 1, sets))  # the last is what waits for nothing
        duration[: self.rows] = table[columns.op, columns.stage]
        messages = slice(self.rows, self.rows + self.sent)
        duration[messages] = [link.time for link in links]
        latency[messages] = [link.latency for link in links]
        duration, flight = duration[sweeps.nodes], latency[sweeps.waits_for]
        end = np.zeros((len(sweeps.nodes) + 1, sets))
        for here, behind, needed in sweeps.each:
            np.maximum(end[behind], end[needed] + flight[here], out=end[here])
            end[here] += duration[here]
        return end.max(axis=0)


class _Sweeps(NamedTuple):
    """Nodes in the order in which sweeps do them, so that those of one sweep are a slice.

    Attributes:
        nodes: [nodes] in that order.
        waits_for: [nodes] the node that each waits for; their number where it waits for nothing.
        each: for each sweep (where its nodes are in the order, where those before them on their lanes, where those that
            they wait for); the end, where there is none.
    """

    nodes: np.ndarray
    waits_for: np.ndarray
    each: list[tuple[slice, np.ndarray, np.ndarray]]

    @staticmethod
    def of(graph: Graph, columns: Columns) -> _Sweeps:
        """Each lane goes on by a node wherever that can be."""
        count = len(graph.next)
        waits_for = np.where(graph.waits_for == NOTHING, count, graph.waits_for)
        place = np.full(count + 1, NOTHING)  # in the order
        place[count] = count
        head, before = graph.first.astype(np.int64), np.full(len(graph.first), count)
        nodes, each, done = [np.empty(0, np.int64)], [], 0
        while len(head):
            ready = place[waits_for[head]] != NOTHING
            if not ready.any():
                raise UsageError(deadlock(head[head < graph.rows], columns))
            now = head[ready]
            here = slice(done, done := done + len(now))
            each.append((here, place[before[ready]], place[waits_for[now]]))
            nodes.append(now)
            place[now] = np.arange(here.start, done)
            before[ready], head[ready] = now, graph.next[now]
            left = head != NOTHING
            head, before = head[left], before[left]
        order = np.concatenate(nodes)
        return _Sweeps(order, waits_for[order], each)
