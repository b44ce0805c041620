"""Result of a simulated step: start and end of every action, idle time and memory per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.pipeline.program import Action
from shoal.pipeline.simulator.columns import COMPUTING, STEP, Columns


@dataclass(frozen=True)
class Messages:
    """Messages between pipeline ranks."""

    # source, target: [messages] pipeline ranks
    source: np.ndarray
    target: np.ndarray
    # producer, consumer: [messages] rows of the timeline's columns
    producer: np.ndarray
    consumer: np.ndarray
    start: np.ndarray  # [kinds, messages] time at which each enters its link
    end: np.ndarray  # [kinds, messages] arrival time


class Interval(NamedTuple):
    """One action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Replicas form several kinds only if a disturbance makes them differ; kind 0 is the undisturbed one, if any. Times
    are in the unit of the durations.

    Attributes:
        columns: the rows: op, stage, micro-batch, part, version and pipeline rank of each.
        replicas: [kinds] number of replicas of each kind.
        start, end: [kinds, rows].
        pairs: rows of forwards that were computed together with the next row.
        messages: messages between the ranks.
    """

    columns: Columns
    replicas: np.ndarray
    start: np.ndarray
    end: np.ndarray
    pairs: np.ndarray
    messages: Messages

    def __repr__(self) -> str:
        return f"<Timeline: {self.step_time:.4g} a step, bubble {100 * self.bubble:.1f} %, {self.ranks:,} ranks>"

    @property
    def ranks(self) -> int:
        return self.columns.ranks

    def intervals(self, rank: int, kind: int = 0) -> Iterator[Interval]:
        for row in range(self.columns.offset[rank], self.columns.offset[rank + 1]):
            yield Interval(self.columns.action(row), float(self.start[kind, row]), float(self.end[kind, row]))

    # ---- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def step_time(self) -> float:
        """Time from the start of the step to the end of the last action on any rank."""
        return float(self.end.max())

    @cached_property
    def busy(self) -> np.ndarray:
        """[kinds, ranks] Time in computations; a pair counts once."""
        computing = self.columns.op <= COMPUTING
        computing[self.pairs] = False
        return self._by_rank(np.where(computing, self.end - self.start, 0.0))

    @cached_property
    def idle(self) -> np.ndarray:
        """[kinds, ranks] Time outside computations, up to the end of the last computation on any rank."""
        return self.compute_span - self.busy

    @cached_property
    def compute_span(self) -> float:
        """Time from the start of the step to the end of the last computation on any rank."""
        return float(self.end[:, self.columns.op <= COMPUTING].max())

    @cached_property
    def bubble(self) -> float:
        """Idle share of the computing span, over all ranks: (p-1)/(m+p-1) for GPipe and 1F1B.

        Huang et al. 2019 (GPipe), section 2.3.
        """
        span = self.compute_span
        return float(np.average(self.idle.mean(axis=1), weights=self.replicas) / span) if span else 0.0

    @cached_property
    def bubble_over_ideal(self) -> float:
        """Ratio of idle time to computing time: (p-1)/m for GPipe and 1F1B.

        Narayanan et al. 2021 (Megatron-LM), section 2.2: "bubble time fraction (pipeline bubble size)".
        """
        busy = np.average(self.busy.mean(axis=1), weights=self.replicas)
        return float((self.compute_span - busy) / busy)

    @cached_property
    def bubble_of_slowest_rank(self) -> float:
        """(cost - work) / cost of the rank with the largest cost, from the start of its first to the end of its last
        computation.

        Qi et al. 2024 (zero bubble), section 5.3: ranks may begin the next step before others have finished this one.
        """
        slowest = np.unravel_index(np.argmax(self.own_span), self.own_span.shape)
        return float(self.stall[slowest] / self.own_span[slowest]) if self.own_span[slowest] else 0.0

    @cached_property
    def own_span(self) -> np.ndarray:
        """[kinds, ranks] Time from each rank's first computation to the end of its last."""
        computing = self.columns.op <= COMPUTING
        first = self._by_rank(np.where(computing, self.start, np.inf), np.minimum)
        span: np.ndarray = self._by_rank(np.where(computing, self.end, -np.inf), np.maximum) - first
        return span

    @cached_property
    def stall(self) -> np.ndarray:
        """[kinds, ranks] Idle time within each rank's own span."""
        stall: np.ndarray = self.own_span - self.busy
        return stall

    @cached_property
    def critical_path(self) -> list[tuple[Interval, int]]:
        """Chain of actions that determines the step's end, first to last, each with its pipeline rank.

        The chain is in the kind of replica that ends last. Each action waits for the one before it, for its message, or
        for another replica.
        """
        columns, messages = self.columns, self.messages
        kind = int(np.argmax(self.end.max(axis=1)))
        start, end = self.start[kind], self.end[kind]
        producer = dict(zip(messages.consumer.tolist(), range(len(messages.consumer)), strict=True))
        firsts = set(columns.offset[:-1].tolist())
        rank, row, path = columns.rank, int(np.argmax(end)), []
        while True:
            path.append((Interval(columns.action(row), float(start[row]), float(end[row])), int(rank[row])))
            if row not in firsts and end[row - 1] >= start[row]:
                row -= 1
            elif row in producer:
                row = int(messages.producer[producer[row]])
            elif row in firsts:
                return path[::-1]
            else:
                row -= 1

    # ---- memory --------------------------------------------------------------------------------------------------

    @cached_property
    def peak_live(self) -> np.ndarray:
        """[ranks] Maximum activations alive together: micro-batches on one stage, from F to B (to W if split).

        A slice of the sequence counts as its share.
        """
        return self.columns.peak_bytes(1.0)

    @cached_property
    def weight_versions(self) -> np.ndarray:
        """[ranks] Maximum number of versions of one stage's weights kept together; 1 for synchronous programs.

        A STEP of the stage creates a version. It is kept until the next is created and the last action that uses it is
        done.
        """
        return np.array([_versions(self.columns, rank) for rank in range(self.ranks)])

    def _by_rank(self, values: np.ndarray, reduce: np.ufunc = np.add) -> np.ndarray:
        return reduce.reduceat(values, self.columns.offset[:-1], axis=1)


def _versions(columns: Columns, rank: int) -> int:
    rows = slice(columns.offset[rank], columns.offset[rank + 1])
    stage, version, steps = columns.stage[rows], columns.version[rows], columns.op[rows] == STEP
    most = 1
    for one in set(stage[version >= 0].tolist()):
        made = np.flatnonzero(steps & ((stage == one) | (stage == -1)))  # the k-th entry creates version k
        uses = np.flatnonzero((stage == one) & (version >= 0) & ~steps)
        last_use = np.full(len(made) + 1, -1)
        np.maximum.at(last_use, version[uses], uses)
        older = np.arange(len(made))[:, None] >= np.arange(len(made) + 1)
        most = max(most, 1 + int((older & (last_use > made[:, None])).sum(axis=1).max(initial=0)))
    return most
