"""Effective training time: wall-clock time spent in steps that counted.

A step that was lost with a rank and repeated counts once. Startup, validation, saving, failure detection and restarts
do not count.
"""

from __future__ import annotations

import time
from bisect import bisect_right

POINTS = 10_000


class EffectiveTime:
    """Tracker of the effective time [s] of a run by step."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._course = [(0, 0.0)]  # (steps done, seconds spent in them), both increasing
        self._before = 0.0  # effective seconds before the current attempt

    def begun(self, steps: int) -> None:
        """Start an attempt that resumes after ``steps`` steps: later steps of previous attempts no longer count."""
        self._before = self._at(steps)
        self._course = [*(point for point in self._course if point[0] < steps), (steps, self._before)]

    def stepped(self, steps: int, seconds: float) -> None:
        """Record that the attempt has reached ``steps`` steps and spent ``seconds`` in its own ones."""
        if steps <= self._course[-1][0]:
            return
        self._course.append((steps, self._before + seconds))
        if len(self._course) > POINTS:
            self._course = self._course[::2] + self._course[-1:]

    @property
    def counted(self) -> float:
        """Effective time so far [s]."""
        return self._course[-1][1]

    @property
    def seconds(self) -> float:
        """Wall-clock time since construction [s]."""
        return time.monotonic() - self._began

    def _at(self, steps: int) -> float:
        """Return the effective seconds after ``steps`` steps, interpolating linearly."""
        right = bisect_right(self._course, (steps, float("inf")))
        (first, begin), (last, end) = self._course[right - 1], self._course[min(right, len(self._course) - 1)]
        return begin if last == first else begin + (end - begin) * (steps - first) / (last - first)
