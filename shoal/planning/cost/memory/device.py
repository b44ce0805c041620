"""Device memory of a process outside torch's allocator."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from shoal.spec.catalog.calibration import Calibration

V = TypeVar("V", float, np.ndarray)
GB = 1e9
SEEN = 80e9  # memory in bytes of the accelerators whose failed runs `context` was fitted to


def outside(memory: V, calibration: Calibration) -> V:
    """Return the bytes that a process needs outside torch's allocator, for accelerators with this memory.

    On accelerators smaller than the fitted ones, the fraction of memory stays constant: most of it is the estimates'
    error of a peak, which shrinks with the memory to fill (docs/validate.md).
    """
    return calibration.numbers["context"] * GB * np.minimum(1.0, memory / SEEN)
