"""Effective training time: the share of the wall-clock that went into steps that counted.

A step that was lost with a rank and made again counts once. Nothing else counts: starting, validating, saving, noticing
a failure, restarting.
"""

from __future__ import annotations

import time
from bisect import bisect_right

POINTS = 10_000


class EffectiveTime:
    """Tracks, for each step of a run, the seconds that had been spent in steps that count."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._course: list[tuple[int, float]] = []  # (steps done, seconds spent in them), both growing
        self._before = 0.0  # seconds that had counted when the present attempt began

    def begun(self, steps: int) -> None:
        """An attempt resumes after so many steps: what was done beyond them does not count."""
        self._before = self._at(steps)
        self._course = [*(point for point in self._course if point[0] < steps), (steps, self._before)]

    def stepped(self, steps: int, seconds: float) -> None:
        """The attempt has done so many steps, with so many seconds in its own ones."""
        if not self._course or steps <= self._course[-1][0]:
            return
        self._course.append((steps, self._before + seconds))
        if len(self._course) > POINTS:
            self._course = self._course[::2] + self._course[-1:]

    @property
    def counted(self) -> float:
        """Seconds in steps that count, so far."""
        return self._course[-1][1] if self._course else 0.0

    @property
    def seconds(self) -> float:
        """Since this was made."""
        return time.monotonic() - self._began

    def _at(self, steps: int) -> float:
        """Seconds spent by the time that so many steps were done; between two known points as if all took as long."""
        right = bisect_right(self._course, (steps, float("inf")))
        if right == 0:
            return 0.0
        (first, begin), (last, end) = self._course[right - 1], self._course[min(right, len(self._course) - 1)]
        return begin if last == first else begin + (end - begin) * (steps - first) / (last - first)
