"""Simulate one step of a program with given times, links and disturbances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.pipeline.program import Program
from shoal.pipeline.simulator.columns import GATHER, REDUCE, Columns
from shoal.pipeline.simulator.player import Player
from shoal.pipeline.simulator.timeline import Messages, Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

MOST_PASSES = 1 << 22  # of a simulated step, which takes a minute


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of single ranks and links, and noise on all computations.

    Ranks are global, numbered as in a mesh of axes (pp, dp, tp) from outer to inner. With one replica and tp 1 they are
    the pipeline ranks.

    Attributes:
        stragglers: map from a rank to the factor on all its computing times, including its optimizer.
        slow_links: map from two ranks to the factor on the messages between them, in both directions.
        jitter: coefficient of variation of every computation: its time is multiplied by an independent log-normal
            variable with mean 1 and this standard deviation.
        seed: random seed of the jitter.
    """

    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, factors in (("straggler", self.stragglers), ("slow link", self.slow_links)):
            for who, factor in factors.items():
                if not (np.isfinite(factor) and factor > 0):
                    raise UsageError(f"{name} {who}: the factor {factor} must be above 0; 2 is twice as slow")
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"jitter {self.jitter}: allowed are 0 to 1, the standard deviation over the mean")


def simulate(
    program: Program | Columns,
    times: ActionTimes | np.ndarray | None = None,
    links: MessageTimes | None = None,
    *,
    disturbance: Disturbance | None = None,
    dp: PositiveInt = 1,
    tp: PositiveInt = 1,
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
        UsageError: the times do not match the program, the disturbance does not match the ranks, the step is too large,
            or the program is invalid (`ProgramError`).

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
    if not columns.rows:
        raise UsageError("Program: no rank has an action.\n  Give `actions` for one at least.")
    if disturbance.jitter:  # without, equal replicas take no time
        described = columns.program
        cells = described.stages * described.sequence_slices // columns.ranks
        check_size(columns.ranks, described.microbatches, dp, disturbance, cells)
    replicas, slower = _group_replicas(disturbance, columns.ranks, dp, tp)
    rows, kinds, rank = columns.rows, len(replicas), columns.rank
    if isinstance(times, np.ndarray) and times.shape != (rows,):
        raise UsageError(f"times: an array of shape {times.shape}, and the program has {rows} actions.\n  "
                         "Give a duration for each row of its columns, or ActionTimes.")
    source, target = rank[producer], rank[consumer]

    computing = slower[:, rank, rank]  # [kinds, rows]
    if disturbance.jitter:
        computing *= _noise(disturbance, computing.shape)
    computing[:, np.isin(columns.op, (REDUCE, GATHER))] = 1.0  # collectives
    factors = np.concatenate([computing, slower[:, source, target]], axis=1).T  # [events, kinds]
    time, flight = links.between(source, target)
    duration = np.append(times.per_row(columns) if isinstance(times, ActionTimes) else times, time)[:, None] * factors
    latency = np.append(np.zeros(rows), flight)[:, None] * factors
    start, end, arrival = player.play(duration, latency, together=kinds > 1).transpose(0, 2, 1)
    begin, ends, pairs = start[:, :rows], end[:, :rows], player.pairs
    begin[:, pairs], ends[:, pairs] = begin[:, pairs + 1], ends[:, pairs + 1]
    messages = Messages(source, target, producer, consumer, start[:, rows:], arrival[:, rows:])
    return Timeline(columns, replicas, begin, ends, pairs, messages)


def check_size(pp: int, microbatches: int, dp: int, disturbance: Disturbance, cells: int = 1) -> None:
    """Reject a step that is too large to simulate in minutes.

    Args:
        cells: forward passes of a rank for each micro-batch.
    """
    replicas = dp if disturbance.jitter else 1 + len(disturbance.stragglers) + len(disturbance.slow_links)
    if pp * max(pp, microbatches * cells) * min(dp, replicas) > MOST_PASSES:  # links are a table of pp x pp
        raise UsageError(
            f"--pp {pp} --microbatches {microbatches} --dp {dp}: a step with more than {MOST_PASSES:,} forward passes "
            "or links is not simulated.\n  Lower one of them."
        )


def _noise(disturbance: Disturbance, shape: tuple[int, ...]) -> np.ndarray:
    """Draw log-normal factors with mean 1."""
    variance = np.log1p(disturbance.jitter**2)
    return np.random.default_rng(disturbance.seed).lognormal(-variance / 2, np.sqrt(variance), shape)


def _group_replicas(disturbance: Disturbance, pp: int, dp: int = 1, tp: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Group pipeline replicas into the fewest kinds that behave differently; with jitter all differ.

    The tensor-parallel ranks of one replica and stage run in lockstep, at the speed of the slowest.

    Returns:
        [kinds] the number of replicas of each kind, undisturbed ones first; and [kinds, pp, pp] the factor on messages
        from one pipeline rank to another, with the factor on a rank's computations on the diagonal.

    Raises:
        UsageError: a straggler or a slow link does not exist in this world.
    """
    world = f"the world has ranks 0 to {pp * dp * tp - 1} (pp {pp} x dp {dp} x tp {tp})"
    slow: dict[int, dict[tuple[int, int], float]] = {}  # by replica: factors by source and target

    def note(replica: int, source: int, target: int, factor: float) -> None:
        known = slow.setdefault(replica, {})
        known[source, target] = max(known.get((source, target), factor if tp == 1 else 1.0), factor)

    for rank, factor in disturbance.stragglers.items():
        if not 0 <= rank < pp * dp * tp:
            raise UsageError(f"straggler {rank}: {world}")
        note(rank // tp % dp, rank // (dp * tp), rank // (dp * tp), factor)
    for (a, b), factor in disturbance.slow_links.items():
        if not (0 <= a < pp * dp * tp and 0 <= b < pp * dp * tp):
            raise UsageError(f"slow link {a}-{b}: {world}")
        (i, x), (j, y) = (divmod(rank, dp * tp) for rank in (a, b))
        if x != y or i == j:
            raise UsageError(
                f"slow link {a}-{b}: activations only pass between pipeline ranks of one replica; "
                f"rank {a} meets {', '.join(str(k * dp * tp + x) for k in range(pp) if k != i) or 'none'}"
            )
        note(x // tp, i, j, factor)
        note(x // tp, j, i, factor)
    differ = range(dp) if disturbance.jitter else sorted(slow)
    same = Counter((r if disturbance.jitter else -1, tuple(sorted(slow.get(r, {}).items()))) for r in differ)
    if undisturbed := dp - len(differ):
        same[-1, ()] = undisturbed
    kinds = sorted(same, key=lambda kind: not disturbance.jitter and bool(kind[1]))
    factors = np.ones((len(kinds), pp, pp))
    for i, (_, own) in enumerate(kinds):
        for pair, factor in own:
            factors[i, *pair] = factor
    return np.array([same[kind] for kind in kinds]), factors
