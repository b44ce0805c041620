"""The few functions that formulas need, of plain numbers or of arrays: written once, they serve one run and thousands.

A single run is priced in plain numbers, so that `shoal estimate` need not import numpy, which takes longer than its
answer; searches and fits give arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Value = float | np.ndarray
    """A number of one run, or one for each of many."""


def plain(*values: Value) -> bool:
    """Whether these are numbers."""
    return all(isinstance(value, float | int) for value in values)


def maximum(a: Value, b: Value) -> Value:
    """The larger."""
    return max(a, b) if plain(a, b) else _numpy().maximum(a, b)


def minimum(a: Value, b: Value) -> Value:
    """The smaller."""
    return min(a, b) if plain(a, b) else _numpy().minimum(a, b)


def clip(value: Value, least: Value, most: Value) -> Value:
    """No less than the one, and no more than the other."""
    return minimum(maximum(value, least), most)


def where(condition: Value, yes: Value, no: Value) -> Value:
    """The one where the condition holds, else the other; both have been computed."""
    return (yes if condition else no) if plain(condition) else _numpy().where(condition, yes, no)


def choose(code: Value, among: Sequence[Value]) -> Value:
    """One of several, by its number."""
    return among[code] if plain(code) else _numpy().choose(code, among)


def ceil(value: Value) -> Value:
    """Rounded up."""
    return float(math.ceil(value)) if plain(value) else _numpy().ceil(value)


def log2(value: Value) -> Value:
    """Doublings."""
    return math.log2(value) if plain(value) else _numpy().log2(value)


def _numpy():
    import numpy as np

    return np
