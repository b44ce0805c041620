"""Find stragglers: the seconds that each rank computes in a step, and the slowest rank by name."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from shoal.engine.device import Stopwatch
from shoal.pipeline.program import COMPUTE, Action

MEASURED = 10
"""Steps of which the times are taken, the last before each report: marks on a device are not free."""


class ComputeTimer:
    """A `Recorder` of how long forwards and backwards take on this rank's device.

    What a rank waits for inside a forward or backward (the others of its tensor- or context-parallel group) counts as
    computing: such a group is slow together.
    """

    def __init__(self, device: torch.device):
        self._watch = Stopwatch(device)
        self._marks: list = []
        self._begin = None
        self.on, self.steps = False, 0

    def start(self) -> None:
        """Take the times from now on."""
        self._watch.start()
        self._marks, self.on, self.steps = [], True, 0

    def begin(self, action: Action) -> None:
        """As `Recorder`."""
        if self.on:
            self._begin = self._watch.mark()

    def arrived(self, action: Action) -> None:
        """As `Recorder`: waiting for a neighbour in the pipeline is not computing."""
        self.begin(action)

    def end(self, action: Action) -> None:
        """As `Recorder`."""
        if self.on and action.op in COMPUTE:
            self._marks += [self._begin, self._watch.mark()]

    def stop(self) -> float:
        """Seconds of computing per step since `start`."""
        self.on = False
        moments = self._watch.seconds(self._marks)
        return sum(b - a for a, b in zip(moments[::2], moments[1::2], strict=True)) / max(1, self.steps)


@dataclass(frozen=True)
class Slowest:
    """The rank that computes longest in a step; all times in seconds."""

    rank: int
    host: str
    computing: float
    usual: float  # the median of all ranks
    total: float  # the whole step, the same for all
    ranks: tuple[float, ...]  # computing of every rank, in order
    waiting: tuple[float, ...]  # what is left of the step to every rank: waiting, exchanging, updating

    @property
    def times(self) -> float:
        """The ratio to the median."""
        return self.computing / self.usual if self.usual else 1.0

    def __str__(self) -> str:
        return (
            f"slowest: rank {self.rank} on {self.host} computes {self.computing:.3g} s of each step, "
            f"{self.times:.2f} times the median; the step takes {self.total:.3g} s"
        )


def slowest(computing: list[float], hosts: list[str], total: float) -> Slowest:
    """Find the slowest rank from every rank's seconds of computing in a step, and their hosts.

    >>> slowest([1.0, 1.0, 3.0, 1.0], ["a", "a", "b", "b"], total=4.0).times
    3.0
    """
    worst = max(range(len(computing)), key=computing.__getitem__)
    waiting = tuple(max(0.0, total - one) for one in computing)
    return Slowest(
        worst, hosts[worst], computing[worst], statistics.median_low(computing), total, tuple(computing), waiting
    )
