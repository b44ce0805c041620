"""Silent-failure checks: replica divergence, data corruption, loss spikes, stragglers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median_low
from typing import Any

import torch.distributed as dist

from shoal.engine.collectives.json_collectives import HostGroup, gather
from shoal.training.records.timer import ActionTimer
from shoal.training.resilience.reexecute import reexecute
from shoal.training.resilience.replicas import compare_replicas
from shoal.training.resilience.spikes import Spike, SpikeDetector
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import StepResult

MEASURED = 10
"""Steps timed before each report on stragglers; not all, as timing marks on a device have a cost."""


@dataclass(frozen=True)
class Slowest:
    """Slowest rank of a step; all times in seconds."""

    rank: int
    host: str
    computing: float
    usual: float  # median over all ranks
    total: float  # duration of the step, equal on all ranks
    ranks: tuple[float, ...]  # compute time by rank
    waiting: tuple[float, ...]  # remaining time by rank: waiting, communication, update

    @property
    def times(self) -> float:
        """Ratio of the slowest rank to the median."""
        return self.computing / self.usual if self.usual else 1.0

    def __str__(self) -> str:
        return (
            f"slowest: rank {self.rank} on {self.host} computes {self.computing:.3g} s of each step, "
            f"{self.times:.2f} times the median; the step takes {self.total:.3g} s"
        )


class SilentFailureChecks:
    """Silent-failure checks of a run. All ranks must call the same methods in the same order.

    Args:
        extra: values saved with the state that the run resumes from.

    Raises:
        SilentFailure: replicas differ at the start.

    Attributes:
        proven: last step after which replicas were equal or, if they are not compared, last step whose two executions
            agreed; after a failed check, newer states are not trusted.
    """

    def __init__(self, engine: Engine, step: int, extra: dict[str, Any]):
        self.engine, self.proven = engine, step
        self.config = config = engine.config.failover
        self.group: HostGroup = dist.group.WORLD if engine.mesh.layout.world_size > 1 else None
        self.spikes = SpikeDetector(config.spike_factor, config.spike_window) if config.spike_factor else None
        self.rollbacks = 0
        self.timer: ActionTimer | None = None
        if config.stragglers_every:
            self.timer = ActionTimer(engine.mesh.device)
            engine.runtime.recorders.append(self.timer)
        self._seconds: list[float] = []  # of each step measured by the timer
        self.restore(step, extra)
        if config.check_replicas_every:
            compare_replicas(engine, step, self.group)

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores in its ``extra``."""
        return {"spikes": self.spikes.state(), "rollbacks": self.rollbacks} if self.spikes else {}

    def restore(self, step: int, extra: dict[str, Any]) -> None:
        """Resume from the state after ``step``; previous rollbacks still count."""
        self.proven = min(self.proven, step)
        self.rollbacks = max(self.rollbacks, extra.get("rollbacks", 0))
        if self.spikes:
            self.spikes.restore(extra.get("spikes"))

    def before_step(self, step: int) -> None:
        """After ``step`` steps, compute the next one twice and start timing, if due.

        Raises:
            SilentFailure: the two executions differ.
        """
        every = self.config.reexecute_every
        if every and step % every == 0:
            reexecute(self.engine, step, self.group, self.config.reexecute_on)
            if not self.config.check_replicas_every:
                self.proven = step
        every = self.config.stragglers_every
        if self.timer and step % every == max(0, every - MEASURED):
            self.timer.start()
            self._seconds = []

    def after_step(self, step: int, seconds: float) -> Slowest | None:
        """Compare replicas and compute times of ranks after ``step`` steps, if due; return the slowest, on rank 0.

        Raises:
            SilentFailure: replicas differ; the message names the ranks.
        """
        if (every := self.config.check_replicas_every) and step % every == 0:
            compare_replicas(self.engine, step, self.group)
            self.proven = step
        if self.timer and self.timer.on:
            self._seconds.append(seconds)
            if step % self.config.stragglers_every == 0:
                self.timer.on = False
                computing = self.timer.compute_seconds() / len(self._seconds)
                ranks = gather([computing, socket.gethostname()], self.group)
                return find_slowest(ranks, mean(self._seconds)) if ranks else None
        return None

    def spike(self, result: StepResult) -> Spike | None:
        """Return a spike of the step's loss or gradient norm, if any; equal on all ranks."""
        return self.spikes.look(result.loss, result.gradient_norm) if self.spikes and result.tokens else None

    def may_roll_back(self) -> bool:
        """Return whether one more rollback is allowed, and count it."""
        allowed = self.rollbacks < self.config.spike_rollbacks
        self.rollbacks += allowed
        return allowed


def find_slowest(ranks: Sequence[tuple[float, str]], total: float) -> Slowest:
    """Find the slowest rank from each rank's compute seconds in a step and its host.

    >>> find_slowest([(1.0, "a"), (1.0, "a"), (3.0, "b"), (1.0, "b")], total=4.0).times
    3.0
    """
    computing = tuple(seconds for seconds, _ in ranks)
    worst = computing.index(max(computing))
    waiting = tuple(max(0.0, total - seconds) for seconds in computing)
    return Slowest(worst, ranks[worst][1], max(computing), median_low(computing), total, computing, waiting)
