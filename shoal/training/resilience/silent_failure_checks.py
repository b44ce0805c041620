"""Silent-failure checks: replica divergence, data corruption, loss spikes, stragglers."""

from __future__ import annotations

import socket
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shoal.engine.collectives.json_collectives import Group, gather
from shoal.spec.config import FailoverConfig
from shoal.training.records.timer import ActionTimer
from shoal.training.resilience.reexecute import reexecute
from shoal.training.resilience.replicas import compare_replicas
from shoal.training.resilience.spikes import Spike, SpikeDetector
from shoal.training.resilience.stragglers import MEASURED, Slowest, find_slowest

if TYPE_CHECKING:
    from shoal.training.step.engine import Engine, StepResult


class SilentFailureChecks:
    """Silent-failure checks of a run. All ranks must call the same methods in the same order.

    Args:
        config: which checks run, and how often.
        step: optimizer steps done.
        extra: values saved with the state that the run resumes from.

    Raises:
        SilentFailure: replicas differ at the start.

    Attributes:
        proven: last step after which replicas were equal or, if they are not compared, last step whose two executions
            agreed; after a failed check, newer states are not trusted.
        spikes: spike detector; None if disabled.
    """

    def __init__(self, engine: Engine, config: FailoverConfig, step: int, extra: dict[str, Any]):
        self.engine, self.config, self.proven = engine, config, step
        self.group: Group = dist.group.WORLD if engine.mesh.layout.world_size > 1 else None
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
        """Compute the next step twice and start timing, if due.

        Args:
            step: optimizer steps done.

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
        """Compare the replicas and the compute times of ranks, if due.

        Args:
            step: optimizer steps done.
            seconds: duration of the last step.

        Returns:
            The slowest rank, on rank 0 when a report is due.

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
        return self.spikes.look(result.loss, result.gradient_norm) if self.spikes else None

    def may_roll_back(self) -> bool:
        """Return whether one more rollback is allowed, and count it."""
        allowed = self.rollbacks < self.config.spike_rollbacks
        self.rollbacks += allowed
        return allowed
