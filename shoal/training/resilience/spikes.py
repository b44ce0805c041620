"""Detect spikes of the loss or the gradient norm, and skip the batches that caused them.

PaLM's remedy (Chowdhery et al. 2022, section 5.1): roll back to a state before the spike, and skip the batches around
it. It was the batch together with the state that mattered: the same data did no harm elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

FEWEST = 8
"""Steps that must have been seen before one can be out of the ordinary."""

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation


@dataclass(frozen=True)
class Spike:
    """A value far above the median before it."""

    what: str  # "loss" or "gradient norm"
    value: float
    usual: float  # the median
    times: float  # how many robust standard deviations it is above it

    def __str__(self) -> str:
        return f"{self.what} {self.value:.4g} is {self.times:.0f} deviations above the {self.usual:.4g} of late"


class SpikeDetector:
    """Watches the losses and gradient norms of a run.

    Median and median absolute deviation (Hampel 1974) do not move when a few values of the window are spikes
    themselves, as mean and deviation do.

    Args:
        factor: robust standard deviations above the median that make a spike.
        window: steps that the median is of.
    """

    def __init__(self, factor: float, window: int):
        self.factor, self.window = factor, window
        self._seen: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def look(self, loss: float, norm: float) -> Spike | None:
        """Take in one step. A spike is not taken in: it is no part of what is usual."""
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if spike := self._judge(what, value):
                return spike
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if math.isfinite(value):  # the norm of a step that was skipped is not
                self._seen[what].append(value)
        return None

    def _judge(self, what: str, value: float) -> Spike | None:
        seen = self._seen[what]
        if len(seen) < FEWEST or not math.isfinite(value):
            return None
        usual = statistics.median(seen)
        # A loss that has hardly moved is not out of the ordinary for moving by a per mille.
        spread = max(_NORMAL * statistics.median(abs(x - usual) for x in seen), 1e-3 * abs(usual))
        times = (value - usual) / spread if spread else math.inf if value > usual else 0.0
        return Spike(what, value, usual, times) if times > self.factor else None

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint stores, so that a resumed run sees the same spikes."""
        return {what: list(seen) for what, seen in self._seen.items()}

    def restore(self, state: dict[str, list[float]] | None) -> None:
        """Resume from `state`; None forgets everything."""
        for what, seen in self._seen.items():
            seen.clear()
            seen.extend((state or {}).get(what, ()))


class Skips:
    """Map steps to batches of the data, where some batches are skipped.

    >>> skips = Skips([(2, 4)])
    >>> [skips.batch(step) for step in range(4)]
    [0, 1, 4, 5]

    Args:
        ranges: of skipped batches, each (first, one past the last); they may touch and overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.ranges: list[tuple[int, int]] = []
        for start, stop in sorted((int(a), int(b)) for a, b in ranges):
            if self.ranges and start <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(stop, self.ranges[-1][1]))
            elif start < stop:
                self.ranges.append((start, stop))

    def batch(self, step: int) -> int:
        """The number of the batch, of all batches, that a step takes."""
        for start, stop in self.ranges:
            if step >= start:
                step += stop - start
        return step

    def without(self, first_step: int, last_step: int) -> Skips:
        """The same, without the batches of some steps too."""
        return Skips([*self.ranges, (self.batch(first_step), self.batch(last_step) + 1)])
