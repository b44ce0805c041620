"""Timers of training steps and of their computations."""

from __future__ import annotations

import time
from typing import Any

import torch

from shoal.engine.device import Stopwatch, synchronize
from shoal.pipeline.program import COMPUTE, Action


class StepTimer:
    """Timer of training steps, without validation and checkpoints [s]: ``all`` steps, and the ``last`` one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.steps, self.seconds, self.all, self.last, self.begin = 0, 0.0, 0.0, 0.0, 0.0

    def start(self) -> None:
        self.begin = time.perf_counter()

    def stop(self, *, wait: bool = True) -> None:
        """End the step, after the device has finished; without ``wait`` its remaining time counts in the next one."""
        if wait:
            synchronize(self.device)
        self.last = time.perf_counter() - self.begin
        self.seconds += self.last
        self.all += self.last
        self.steps += 1

    def lap(self) -> tuple[int, float]:
        """Return the steps and their seconds since the last lap."""
        lap = self.steps, self.seconds
        self.steps, self.seconds = 0, 0.0
        return lap


class ActionTimer:
    """`Recorder` of when each action of this rank begins, has its message and ends on the device, from `start` on."""

    def __init__(self, device: torch.device):
        self.clock = Stopwatch(device)
        self.on = False
        self.marks: list[tuple[Action, list[Any]]] = []

    def start(self) -> None:
        self.clock.start()
        self.on, self.marks = True, []

    def begin(self, action: Action) -> None:
        if self.on:
            self.marks.append((action, [self.clock.mark()] * 3))

    def arrived(self, action: Action) -> None:
        if self.on:
            self.marks[-1][1][1] = self.clock.mark()

    def end(self, action: Action) -> None:
        if self.on:
            self.marks[-1][1][2] = self.clock.mark()

    def compute_seconds(self) -> float:
        """Return the seconds in forwards and backwards.

        Waiting for a pipeline neighbour does not count. Waiting inside a forward or backward for the other ranks of a
        tensor- or context-parallel group does: such a group is slow together.
        """
        spans = [marks[1:] for action, marks in self.marks if action.op in COMPUTE]
        moments = self.clock.seconds([mark for span in spans for mark in span])
        return sum(moments[1::2]) - sum(moments[::2])
