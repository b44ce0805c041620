"""Silent-failure checks: replicas that differ, steps that compute wrong numbers, loss spikes, stragglers."""

from __future__ import annotations

import socket
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shoal.engine.collectives.json_collectives import Group, gather
from shoal.spec.config import FailoverConfig
from shoal.training.records.timer import ComputeTimer
from shoal.training.resilience.reexecute import reexecute
from shoal.training.resilience.replicas import compare
from shoal.training.resilience.spikes import Spike, SpikeDetector
from shoal.training.resilience.stragglers import MEASURED, Slowest, slowest

if TYPE_CHECKING:
    from shoal.training.step.engine import Engine, StepResult


class SilentFailureChecks:
    """The checks of a run. All methods must be called on all ranks alike.

    Args:
        config: what is checked, and how often.
        step: optimizer steps done.
        extra: what was saved with the state that the run resumes from.

    Raises:
        ReplicasDiffer: at the start already.

    Attributes:
        proven: the last step after which replicas were equal, or where they are not compared the last that was computed
            twice alike; what is newer is not to be trusted when that no longer holds.
        spikes: None where none are looked for.
    """

    def __init__(self, engine: Engine, config: FailoverConfig, step: int, extra: dict[str, Any]):
        self.engine, self.config, self.proven = engine, config, step
        self.group: Group = dist.group.WORLD if engine.mesh.layout.world_size > 1 else None
        self.spikes = SpikeDetector(config.spike_factor, config.spike_window) if config.spike_factor else None
        self.rollbacks = 0
        self.timer: ComputeTimer | None = None
        if config.stragglers_every:
            self.timer = ComputeTimer(engine.mesh.device)
            engine.runtime.recorders.append(self.timer)
        self._seconds: list[float] = []  # of each step that the timer has measured
        self.restore(step, extra)
        if config.check_replicas_every:
            compare(engine, step, self.group)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores in its ``extra``."""
        return {"spikes": self.spikes.state(), "rollbacks": self.rollbacks} if self.spikes else {}

    def restore(self, step: int, extra: dict[str, Any]) -> None:
        """The run resumes from the state after ``step``; its roll-backs so far still count."""
        self.proven = min(self.proven, step)
        self.rollbacks = max(self.rollbacks, extra.get("rollbacks", 0))
        if self.spikes:
            self.spikes.restore(extra.get("spikes"))

    def before_step(self, step: int) -> None:
        """Compute the step that comes twice, where that is due, ``step`` being done.

        Raises:
            SilentCorruption: it gave two results.
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
        """Compare the replicas, and the ranks' pace, where that is due.

        Args:
            step: optimizer steps done.
            seconds: that the last one took.

        Returns:
            The slowest rank, on rank 0 when a report is due.

        Raises:
            ReplicasDiffer: naming the ranks.
        """
        if (every := self.config.check_replicas_every) and step % every == 0:
            compare(self.engine, step, self.group)
            self.proven = step
        if self.timer and self.timer.on:
            self._seconds.append(seconds)
            if step % self.config.stragglers_every == 0:
                self.timer.on = False
                computing = self.timer.seconds() / len(self._seconds)
                told = gather([computing, socket.gethostname()], self.group)
                return slowest([s for s, _ in told], [h for _, h in told], mean(self._seconds)) if told else None
        return None

    def spike(self, result: StepResult) -> Spike | None:
        """Whether the step's loss or gradient norm is out of the ordinary; the same on all ranks."""
        return self.spikes.look(result.loss, result.gradient_norm) if self.spikes else None

    def may_roll_back(self) -> bool:
        """Whether one more roll-back is allowed; it is counted."""
        allowed = self.rollbacks < self.config.spike_rollbacks
        self.rollbacks += allowed
        return allowed
