"""How long steps take, and the computations in them."""

from __future__ import annotations

import time
from typing import Any

import torch

from shoal.engine.device import Stopwatch, synchronize
from shoal.pipeline.program import COMPUTE, Action


class StepTimer:
    """Seconds spent in steps alone, without validation and checkpoints.

    Attributes:
        all: since it was made.
        last: in the last step.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.steps, self.seconds, self.all, self.last, self.begin = 0, 0.0, 0.0, 0.0, 0.0

    def start(self) -> None:
        """Begin a step."""
        self.begin = time.perf_counter()

    def stop(self) -> None:
        """End it, once the device is done."""
        synchronize(self.device)
        self.last = time.perf_counter() - self.begin
        self.seconds += self.last
        self.all += self.last
        self.steps += 1

    def lap(self) -> tuple[int, float]:
        """Return steps and seconds since the last lap."""
        lap = self.steps, self.seconds
        self.steps, self.seconds = 0, 0.0
        return lap


class ComputeTimer:
    """A `Recorder` of how long forwards and backwards take on this rank's device, from `start` on.

    Waiting for a neighbour in the pipeline is not computing. Waiting inside a forward or backward, for the others of a
    tensor- or context-parallel group, counts as computing: such a group is slow together.
    """

    def __init__(self, device: torch.device):
        self.clock = Stopwatch(device)
        self.on = False
        self._marks: list[Any] = []

    def start(self) -> None:
        """Measure from now on."""
        self.clock.start()
        self.on, self._marks = True, []

    def begin(self, action: Action) -> None:
        """As `Recorder`."""
        if self.on:
            self._begin = self.clock.mark()

    def arrived(self, action: Action) -> None:
        """As `Recorder`."""
        self.begin(action)

    def end(self, action: Action) -> None:
        """As `Recorder`."""
        if self.on and action.op in COMPUTE:
            self._marks += [self._begin, self.clock.mark()]

    def seconds(self) -> float:
        """Return the seconds of computing since `start`."""
        moments = self.clock.seconds(self._marks)
        return sum(moments[1::2]) - sum(moments[::2])
