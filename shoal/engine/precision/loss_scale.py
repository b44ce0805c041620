"""Dynamic loss scale: as large as possible without overflow of gradients (Micikevicius et al. 2018, section 3.2).

float16 has no number between 0 and 6e-8, and some gradients are that small. Multiplying the loss by a scale before
backward moves them into range; afterwards the gradients are divided by it in float32. If a gradient overflows anyway,
the step is skipped.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec.config.sections import LARGEST_SCALE, LossScaleConfig


class LossScale:
    """The loss scale and the counters that control it.

    Attributes:
        good: steps since the last change.
        skipped: steps of the run that were skipped.
    """

    def __init__(self, config: LossScaleConfig):
        self.config = config
        self.value, self.good, self.skipped = config.initial, 0, 0

    @property
    def exhausted(self) -> bool:
        return self.value <= self.config.smallest

    def made(self) -> None:
        """Count a step with finite gradients; grow after `interval` of them in a row."""
        self.good += 1
        if self.good == self.config.interval:
            self.value, self.good = min(self.value * self.config.growth, LARGEST_SCALE), 0

    def overflowed(self) -> None:
        """Back off after gradients that were not finite, and count the step as skipped."""
        self.value, self.good = max(self.value * self.config.backoff, self.config.smallest), 0
        self.skipped += 1

    def state(self) -> dict[str, float | int]:
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def restore(self, saved: Any) -> None:
        """Restore the values from a checkpoint; from None, of a run without a scale, start with the initial value.

        Raises:
            UsageError: not the format of `state`.
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
