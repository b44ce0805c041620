"""Plays one program with many sets of durations at once: what a search over layouts asks for.

Which event comes after which follows from the orders alone, not from how long anything takes. So the sweeps of
`shoal.simulate.engine` are found once for a program, and each advances all sets together: [events, sets] arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.nodes, self.rows, self.sent = len(graph.next), columns.rows, messages.shape[1]
        self.sweeps = _sweeps(graph, columns)

    def step_times(self, times: np.ndarray, links: Sequence[Links]) -> np.ndarray:
        """[sets] from the begin of the step to the end of its last action, as `simulate` has it.

        Args:
            times: [6, stages, sets] of forwards, of the halves of backwards for inputs and for weights, reductions,
                steps, gathers.
            links: one for all links of each set, not blocking.
        """
        columns, sets = self.columns, times.shape[2]
        table = np.zeros((7, times.shape[1], sets))
        table[[FORWARD, INPUT, WEIGHT, REDUCE, STEP, GATHER]] = times
        table[BACKWARD] = table[INPUT] + table[WEIGHT]
        duration, latency = np.zeros((self.nodes, sets)), np.zeros((self.nodes, sets))
        duration[: self.rows] = table[columns.op, columns.stage]
        messages = slice(self.rows, self.rows + self.sent)
        duration[messages] = [link.time for link in links]
        latency[messages] = [link.latency for link in links]
        clock = np.zeros((len(self.sweeps[0][0]), sets)) if self.sweeps else np.zeros((1, sets))
        arrival = np.zeros((self.nodes + 1, sets))  # the last is what waits for nothing
        for lanes, nodes, needed in self.sweeps[1:]:
            end = np.maximum(clock[lanes], arrival[needed]) + duration[nodes]
            clock[lanes] = end
            arrival[nodes] = end + latency[nodes]
        return clock.max(axis=0)


def _sweeps(graph: Graph, columns: Columns) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each sweep (lanes, the node that each does, what it waits for); the first is all lanes, and does nothing."""
    nodes = len(graph.next)
    waits_for = np.where(graph.waits_for == NOTHING, nodes, graph.waits_for)
    following = graph.next
    arrived = np.zeros(nodes + 1, bool)
    arrived[nodes] = True
    lanes, head = np.arange(len(graph.first)), graph.first.astype(np.int64)
    found = [(lanes, lanes, lanes)]
    while len(lanes):
        ready = arrived[waits_for[head]]
        if not ready.any():
            raise UsageError(deadlock(head[head < graph.rows], columns))
        done = head[ready]
        found.append((lanes[ready], done, waits_for[done]))
        arrived[done] = True
        head = np.where(ready, following[head], head)
        lanes, head = lanes[head != NOTHING], head[head != NOTHING]
    return found
