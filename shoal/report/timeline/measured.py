"""Recorded steps as timelines, and as durations for a simulation of the same program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from shoal.pipeline.program import Op
from shoal.pipeline.simulator.columns import CODE, COMPUTING, OPS, REDUCE, STEP, Columns, build_columns
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.timeline import Messages, Timeline
from shoal.pipeline.simulator.times import MessageTimes
from shoal.training.records.profile import Profile, RankProfile

WAITED = 20e-6  # s; a shorter wait does not bound the message's time


@dataclass(frozen=True)
class MeasuredStep:
    """A profile arranged by the simulator's rows.

    An action lasts from when its inputs are ready to the start of its rank's next action, which includes posting its
    messages. Actions after the last backward may include waiting for other ranks.
    """

    profile: Profile  # the recorded profile
    columns: Columns  # columns of its program
    # [steps, replicas, tp, rows] time at which each action was ready except for its message, from the step's start [s]
    asked: np.ndarray
    # start, end: [steps, replicas, tp, rows] start and end times
    start: np.ndarray
    end: np.ndarray

    @staticmethod
    def from_profile(profile: Profile) -> MeasuredStep:
        """Arrange a profile; each step starts at 0, with its first computation."""
        columns = build_columns(profile.program)
        steps = len(profile.ranks[0].steps)
        dp, tp = (1 + max(getattr(rank, axis) for rank in profile.ranks) for axis in ("dp", "tp"))
        asked, start, end = (np.empty((steps, dp, tp, columns.rows)) for _ in range(3))
        for rank in profile.ranks:
            rows = slice(columns.offset[rank.pp], columns.offset[rank.pp + 1])
            for step in range(steps):
                where = (step, rank.dp, rank.tp, rows)
                asked[where], start[where], end[where] = _rank(rank, step)
        zero = start.min(axis=(1, 2, 3), keepdims=True)
        return MeasuredStep(profile, columns, np.maximum(asked - zero, 0.0), start - zero, end - zero)

    @cached_property
    def step_times(self) -> np.ndarray:
        """[steps] Time from the start of the first action on any rank to the end of the last [s]."""
        return self.end.max(axis=(1, 2, 3))

    @property
    def step_time(self) -> float:
        return float(self.step_times.mean())

    @property
    def typical(self) -> int:
        """The recorded step whose time is nearest to the mean."""
        return int(np.argmin(np.abs(self.step_times - self.step_time)))

    # ---- as timelines ------------------------------------------------------------------------------------------

    def timeline(self, step: int) -> Timeline:
        """Return one recorded step; each replica is its own kind, shown by its first tensor-parallel rank."""
        start, end, sent = self.start[step, :, 0].copy(), self.end[step, :, 0].copy(), self._messages
        pairs = self.columns.pairs if self.columns.program.paired else np.empty(0, int)
        start[:, pairs], end[:, pairs] = start[:, pairs + 1], end[:, pairs + 1]  # recorded as the backward
        messages = replace(sent, start=end[:, sent.producer], end=start[:, sent.consumer])
        kinds = np.ones(len(start), int)
        return Timeline(self.columns, kinds, start, end, pairs=pairs, messages=messages)

    def simulated(self) -> Timeline:
        """Simulate the same program with the mean times."""
        return self._played(self.times())

    @cached_property
    def replayed(self) -> float:
        """Return the median relative error of the step time when each step is simulated with its own times.

        This is the simulation's own error; with mean times, the variation between steps adds to it.
        """
        own = [self._played(lengths).step_time for lengths in self._lengths]
        return float(np.median(np.array(own) / self.step_times - 1))

    def _played(self, lengths: np.ndarray) -> Timeline:
        return simulate(self.columns, lengths, self.links(), dp=self.start.shape[1], tp=self.start.shape[2])

    def times(self) -> np.ndarray:
        """[rows] Mean time of each op and stage over steps, micro-batches and ranks.

        When ranks synchronise, only the last to arrive does not wait. So a reduction or gather has the shortest time
        over the replicas, and the optimizer (which sums the gradient norm over all ranks) lasts from the last start to
        the last end.
        """
        length = self._lengths.mean(axis=0)
        for _, _, rows in self._groups():
            length[rows] = length[rows].mean()
        return length

    @cached_property
    def _lengths(self) -> np.ndarray:
        """[steps, rows] Duration of each action over the ranks that do it [s]."""
        length, op = self.end - self.start, self.columns.op
        found = np.where(op <= COMPUTING, length.mean(axis=(1, 2)), length.min(axis=(1, 2)))
        rows = (op == STEP) & (self.columns.stage < 0)
        if np.any(rows):
            all_ranks = (1, 2, 3)
            own = self.end[..., rows].max(axis=all_ranks) - self.start[..., rows].max(axis=all_ranks)
            found[:, rows] = own[:, None]
        return found

    def links(self) -> MessageTimes:
        """For each pair of pipeline ranks, the median time of messages that a rank waited for.

        A message that arrived before it was needed has an unknown arrival time. If all of a pair did, the time is 0.
        """
        messages = self._messages
        ranks = self.columns.ranks
        latency = np.zeros((ranks, ranks))
        gone = self.end[..., self.columns.sent_after[messages.producer]]
        flight = self.start[..., messages.consumer] - gone
        waited = self.start[..., messages.consumer] - self.asked[..., messages.consumer] > WAITED
        # The receiver must be ready before the message leaves; otherwise its own delay would be measured.
        seen = waited & (self.asked[..., messages.consumer] <= gone)
        for source, target in set(zip(messages.source.tolist(), messages.target.tolist(), strict=True)):
            own = (messages.source == source) & (messages.target == target)
            if np.any(seen[..., own]):
                latency[source, target] = max(0.0, float(np.median(flight[..., own][seen[..., own]])))
        return MessageTimes(latency=latency)

    @cached_property
    def _messages(self) -> Messages:
        return simulate(self.columns).messages

    # ---- tables ------------------------------------------------------------------------------------------------

    def by_op(self) -> Iterator[tuple[Op, int, int, float, float, float]]:
        """Yield, for each op and stage, the count and the median, mean and maximum duration [s]."""
        length = self.end - self.start
        for op, stage, rows in self._groups():
            found = length[..., rows]
            yield op, stage, found.size, float(np.median(found)), float(found.mean()), float(found.max())

    def _groups(self) -> Iterator[tuple[Op, int, np.ndarray]]:
        """Yield each op and stage (-1 for all stages of the rank), with their rows."""
        for op, stage in product(OPS, range(-1, self.columns.program.stages)):
            rows = np.flatnonzero((self.columns.op == CODE[op]) & (self.columns.stage == stage))
            if len(rows):
                yield op, stage, rows

    def by_rank(self) -> Iterator[tuple[RankProfile, float, float]]:
        """Yield, for each rank, the mean time per step in computations and waiting for their messages [s]."""
        for rank in self.profile.ranks:
            rows = np.arange(self.columns.offset[rank.pp], self.columns.offset[rank.pp + 1])
            rows = rows[self.columns.op[rows] < REDUCE]
            where = (slice(None), rank.dp, rank.tp, rows)
            busy = (self.end[where] - self.start[where]).sum(axis=1)
            waiting = (self.start[where] - self.asked[where]).sum(axis=1)
            yield rank, float(busy.mean()), float(waiting.mean())


def _rank(rank: RankProfile, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when each row of one rank and step was ready, started, and ended.

    Time between two rows (sends of the first and receives for later ones) counts for the first.
    """
    begin, arrived, end = (np.array(times[step]) for times in (rank.begin, rank.arrived, rank.end))
    rows = np.array([i for i, action in enumerate(rank.actions) if action.op in CODE])
    ends = np.append(begin[rows[1:]], end[rows[-1]])
    return begin[rows], arrived[rows], ends
