"""Plays one program with many sets of durations at once: what a search over layouts asks for.

Which event comes after which follows from the orders alone, not from how long anything takes. So the sweeps of
`shoal.pipeline.simulator.engine` are found once for a program, and each advances all sets together: [events, sets]
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.simulator.columns import (
    BACKWARD,
    COMPUTING,
    FORWARD,
    GATHER,
    INPUT,
    OPS,
    REDUCE,
    STEP,
    WEIGHT,
    Columns,
)
from shoal.pipeline.simulator.disturbance import Disturbance, different_replicas
from shoal.pipeline.simulator.engine import NOTHING, EventGraph, deadlock, messages_of
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes


class Replay:
    """A program whose events are in the order of their sweeps.

    Raises:
        UsageError: the program is wrong, as in `simulate`.
    """

    def __init__(self, columns: Columns):
        self.columns = columns
        messages = messages_of(columns)
        quiet = Disturbance()
        graph = EventGraph.of(
            columns, messages, ActionTimes(0, 0, 0), MessageTimes(), quiet, different_replicas(quiet, columns.ranks)
        )
        self.rows, self.sent = columns.rows, messages.shape[1]
        self.sweeps = _Sweeps.of(graph, columns)

    def step_times(self, times: np.ndarray, links: Sequence[MessageTimes]) -> np.ndarray:
        """[sets] from the begin of the step to the end of its last action, as `simulate` has it.

        Args:
            times: [6, stages, sets] of forwards, of the halves of backwards for inputs and for weights, reductions,
                steps, gathers.
            links: one for all links of each set, not blocking.
        """
        sweeps, sets = self.sweeps, times.shape[2]
        duration, latency = np.zeros((2, len(sweeps.nodes) + 1, sets))  # the last is what waits for nothing
        duration[: self.rows] = self._durations(times)
        messages = slice(self.rows, self.rows + self.sent)
        duration[messages] = [link.time for link in links]
        latency[messages] = [link.latency for link in links]
        duration, flight = duration[sweeps.nodes], latency[sweeps.waits_for]
        end = np.zeros((len(sweeps.nodes) + 1, sets))
        for here, behind, needed in sweeps.each:
            np.maximum(end[behind], end[needed] + flight[here], out=end[here])
            end[here] += duration[here]
        last: np.ndarray = end.max(axis=0)
        return last

    def busy(self, times: np.ndarray) -> np.ndarray:
        """[ranks, sets] time in computations."""
        computing = (self.columns.op <= COMPUTING)[:, None]
        return np.add.reduceat(np.where(computing, self._durations(times), 0.0), self.columns.offset[:-1])

    def _durations(self, times: np.ndarray) -> np.ndarray:
        """[rows, sets]"""
        table = np.zeros((len(OPS), *times.shape[1:]))
        table[[FORWARD, INPUT, WEIGHT, REDUCE, STEP, GATHER]] = times
        table[BACKWARD] = table[INPUT] + table[WEIGHT]
        durations: np.ndarray = table[self.columns.op, self.columns.stage]
        return durations


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
    def of(graph: EventGraph, columns: Columns) -> _Sweeps:
        """Each lane goes on by a node wherever that can be."""
        sweep, count = _sweep_of(graph, columns), len(graph.next)
        before, linked = np.full(count, count), np.flatnonzero(graph.next != NOTHING)
        before[graph.next[linked]] = linked
        nodes = np.argsort(sweep, kind="stable")
        waits_for = np.where(graph.waits_for == NOTHING, count, graph.waits_for)[nodes]
        place = np.append(np.argsort(nodes), count)
        ends = np.cumsum(np.bincount(sweep)[1:]).tolist()
        cuts = [slice(*cut) for cut in pairwise([0, *ends])]
        behind, needed = place[before[nodes]], place[waits_for]
        return _Sweeps(nodes, waits_for, [(cut, behind[cut], needed[cut]) for cut in cuts])


def _sweep_of(graph: EventGraph, columns: Columns) -> np.ndarray:
    """[nodes] the sweep that does each, from 1 on: behind that of the node before it on its lane, and of what it waits
    for."""
    following, waits_for = graph.next.tolist(), graph.waits_for.tolist()
    sweep = [0] * (len(following) + 1)  # the last is for NOTHING, which is there before the first
    waiting: dict[int, list[tuple[int, int]]] = {}  # by what they wait for
    going = [(node, 0) for node in graph.first.tolist()]
    while going:
        node, last = going.pop()
        while node != NOTHING:
            needed = waits_for[node]
            if needed != NOTHING and not sweep[needed]:
                waiting.setdefault(needed, []).append((node, last))
                break
            sweep[node] = last = 1 + max(last, sweep[needed])
            going += waiting.pop(node, ())
            node = following[node]
    if waiting:
        heads = np.array([node for behind in waiting.values() for node, _ in behind])
        raise UsageError(deadlock(heads[heads < graph.rows], columns))
    return np.array(sweep[:-1], np.int64)
