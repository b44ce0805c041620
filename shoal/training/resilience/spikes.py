"""Detect spikes of the loss or gradient norm, and skip the batches that caused them.

The remedy is from PaLM (Chowdhery et al. 2022, section 5.1): roll back to a state before the spike and skip the batches
around it. There, spikes depended on the combination of batch and state: elsewhere the same data did no harm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

FEWEST = 8  # minimum number of observed steps before a spike can be detected
_NORMAL = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation


@dataclass(frozen=True)
class Spike:
    """A value far above its running median."""

    what: str  # "loss" or "gradient norm"
    value: float
    usual: float  # the median
    times: float  # distance above the median in robust standard deviations

    def __str__(self) -> str:
        return f"{self.what} {self.value:.4g} is {self.times:.0f} deviations above the {self.usual:.4g} of late"


class SpikeDetector:
    """Detector of spikes in the losses and gradient norms of a run.

    The median and the median absolute deviation (Hampel 1974) are robust to a few spikes in the window, unlike mean and
    standard deviation.

    Args:
        factor: threshold above the median in robust standard deviations.
        window: number of steps in the running median.
    """

    def __init__(self, factor: float, window: int):
        self.factor, self.window = factor, window
        self._seen: dict[str, deque[float]] = {"loss": deque(maxlen=window), "gradient norm": deque(maxlen=window)}

    def look(self, loss: float, norm: float) -> Spike | None:
        """Check one step and add it to the window unless it is a spike."""
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if spike := self._judge(what, value):
                return spike
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if math.isfinite(value):  # the norm of a skipped step is not
                self._seen[what].append(value)
        return None

    def _judge(self, what: str, value: float) -> Spike | None:
        seen = self._seen[what]
        if len(seen) < FEWEST or not math.isfinite(value):
            return None
        usual = statistics.median(seen)
        # Floor of 1e-3 of the median: small moves of a flat loss are not spikes.
        spread = max(_NORMAL * statistics.median(abs(x - usual) for x in seen), 1e-3 * abs(usual))
        times = (value - usual) / spread if spread else 0.0
        return Spike(what, value, usual, times) if times > self.factor else None

    def state(self) -> dict[str, list[float]]:
        """Return the values that a checkpoint stores, so that a resumed run detects the same spikes."""
        return {what: list(seen) for what, seen in self._seen.items()}

    def restore(self, state: dict[str, list[float]] | None) -> None:
        """Restore the result of `state`; None resets the detector."""
        for what, seen in self._seen.items():
            seen.clear()
            seen.extend((state or {}).get(what, ()))


class Skips:
    """Mapping from steps to batches of the data, some of which are skipped.

    >>> skips = Skips([(2, 4)])
    >>> [skips.batch(step) for step in range(4)]
    [0, 1, 4, 5]

    Args:
        ranges: ranges of skipped batches (first, one past the last); they may touch or overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.ranges: list[tuple[int, int]] = []
        for start, stop in sorted((int(a), int(b)) for a, b in ranges):
            if self.ranges and start <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(stop, self.ranges[-1][1]))
            elif start < stop:
                self.ranges.append((start, stop))

    def batch(self, step: int) -> int:
        """Return the index of the batch that a step uses."""
        for start, stop in self.ranges:
            if step >= start:
                step += stop - start
        return step

    def without(self, first_step: int, last_step: int) -> Skips:
        """Return skips that also cover the batches of steps ``first_step`` to ``last_step``."""
        return Skips([*self.ranges, (self.batch(first_step), self.batch(last_step) + 1)])
