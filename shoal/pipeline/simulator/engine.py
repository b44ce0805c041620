"""Simulate one step of a program with given times, links and disturbances."""

from __future__ import annotations

import numpy as np

from shoal.pipeline.program import Program
from shoal.pipeline.simulator.columns import GATHER, REDUCE, Columns
from shoal.pipeline.simulator.disturbance import Disturbance, different_replicas
from shoal.pipeline.simulator.player import Player
from shoal.pipeline.simulator.timeline import Messages, Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes


def simulate(
    program: Program | Columns,
    times: ActionTimes | np.ndarray | None = None,
    links: MessageTimes | None = None,
    *,
    disturbance: Disturbance | None = None,
    dp: int = 1,
    tp: int = 1,
    tied: bool = False,
) -> Timeline:
    """Simulate one step.

    Args:
        program: see `Player`.
        times: durations of the actions, or of the rows of their columns (default: 1 for a computation, 0 for others).
        links: times of the messages (default: 0).
        disturbance: slow ranks and links, noise.
        dp: replicas of the pipeline, which synchronise at each REDUCE and GATHER. Equal ones are simulated once.
        tp: tensor-parallel ranks of each pipeline rank, which run in lockstep.
        tied: see `Player`.

    Raises:
        UsageError: the times do not match the program, the disturbance does not match the ranks, or the program is
            invalid (`ProgramError`).

    >>> from shoal.pipeline.program import build_program
    >>> from shoal.pipeline.schedules import SCHEDULES
    >>> timeline = simulate(build_program(SCHEDULES["zb-h1"], ranks=4, microbatches=8))
    >>> float(timeline.step_time), timeline.peak_live.tolist()
    (27.0, [4.0, 4.0, 4.0, 4.0])
    """
    times = ActionTimes() if times is None else times
    links, disturbance = links or MessageTimes(), disturbance or Disturbance()
    paired = isinstance(times, ActionTimes) and times.pair is not None
    player = Player(program, blocking=links.blocking, paired=paired, tied=tied)
    columns, (producer, consumer) = player.columns, player.messages
    replicas, slower = different_replicas(disturbance, columns.ranks, dp, tp)
    rows, kinds, rank = columns.rows, len(replicas), columns.rank
    source, target = rank[producer], rank[consumer]

    computing = slower[:, rank, rank]  # [kinds, rows]
    if disturbance.jitter:
        computing *= _noise(disturbance, computing.shape)
    computing[:, np.isin(columns.op, (REDUCE, GATHER))] = 1.0  # collectives
    factors = np.concatenate([computing, slower[:, source, target]], axis=1).T  # [events, kinds]
    time, flight = links.between(source, target)
    duration = np.append(times.per_row(columns) if isinstance(times, ActionTimes) else times, time)[:, None] * factors
    latency = np.append(np.zeros(rows), flight)[:, None] * factors
    start, end, arrival = (when.T for when in player.play(duration, latency, together=kinds > 1))
    begin, ends, pairs = start[:, :rows], end[:, :rows], player.pairs
    begin[:, pairs], ends[:, pairs] = begin[:, pairs + 1], ends[:, pairs + 1]
    messages = Messages(source, target, producer, consumer, start[:, rows:], arrival[:, rows:])
    return Timeline(columns, replicas, begin, ends, pairs, messages)


def _noise(disturbance: Disturbance, shape: tuple[int, ...]) -> np.ndarray:
    """Draw log-normal factors with mean 1."""
    variance = np.log1p(disturbance.jitter**2)
    return np.random.default_rng(disturbance.seed).lognormal(-variance / 2, np.sqrt(variance), shape)
