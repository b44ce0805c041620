"""How long steps take."""

from __future__ import annotations

import time

import torch

from shoal.engine.device import synchronize


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
        """A step begins."""
        self.begin = time.perf_counter()

    def stop(self) -> None:
        """It is done, once the device is."""
        synchronize(self.device)
        self.last = time.perf_counter() - self.begin
        self.seconds += self.last
        self.all += self.last
        self.steps += 1

    def lap(self) -> tuple[int, float]:
        """Steps and seconds since the last lap."""
        lap = self.steps, self.seconds
        self.steps, self.seconds = 0, 0.0
        return lap
