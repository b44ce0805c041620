"""What a process has of an accelerator's memory besides what torch's allocator keeps."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from shoal.spec.catalog.calibration import Calibration

V = TypeVar("V", float, np.ndarray)
GB = 1e9
SEEN = 80e9  # bytes of the accelerators whose failed runs `context` was fitted to


def outside(memory: V, calibration: Calibration) -> V:
    """Bytes that a process needs beside what torch's allocator reserves, on accelerators of so many bytes.

    On smaller ones than those that it was fitted to no larger a part of them: most of it is what estimates miss of a
    peak, which is the smaller the less there is to fill (docs/validate.md).
    """
    return calibration.numbers["context"] * GB * np.minimum(1.0, memory / SEEN)
