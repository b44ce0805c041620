"""A loss scale that finds itself: as large as lets no gradient overflow (Micikevicius et al. 2018, section 3.2).

float16 has no number between 0 and 6e-8, and gradients are that small. Multiplied by the scale before backward they are
not; after it, in float32, the scale is taken out again. Where a gradient overflows nevertheless, the step is skipped.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec.config import LossScaleConfig
from shoal.spec.config.precision import LARGEST_SCALE


class LossScale:
    """The scale, and what decides it.

    Attributes:
        value: what the loss is multiplied by now.
        good: steps made since it last changed.
        skipped: steps of the run that were not made.
    """

    def __init__(self, config: LossScaleConfig):
        self.config = config
        self.value, self.good, self.skipped = config.initial, 0, 0

    @property
    def exhausted(self) -> bool:
        """Whether it can go no lower."""
        return self.value <= self.config.smallest

    def made(self) -> None:
        """The gradients of a step were finite: grow after so many in a row."""
        self.good += 1
        if self.good == self.config.interval:
            self.value, self.good = min(self.value * self.config.growth, LARGEST_SCALE), 0

    def overflowed(self) -> None:
        """They were not: back off, and count the step as skipped."""
        self.value, self.good = max(self.value * self.config.backoff, self.config.smallest), 0
        self.skipped += 1

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def restore(self, saved: Any) -> None:
        """Go on from a checkpoint's; from None, of a run that had no scale, with the first value.

        Raises:
            UsageError: not what `state` gives.
        """
        if saved is None:
            return
        known = isinstance(saved, dict) and saved.keys() == self.state().keys()
        value, good, skipped = (saved[key] for key in self.state()) if known else (0.0, 0, 0)
        numbers = isinstance(value, float) and all(type(count) is int and count >= 0 for count in (good, skipped))
        if not (known and numbers and math.isfinite(value) and value > 0):
            raise UsageError(
                f"the checkpoint's loss scale is {saved!r}: it needs a value above 0, and the counts good and skipped."
                "\n  Resume from another checkpoint, or start a new run from its weights."
            )
        self.value, self.good, self.skipped = min(value, LARGEST_SCALE), good % self.config.interval, skipped
