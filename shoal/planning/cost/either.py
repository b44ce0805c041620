"""The few functions that formulas need, of plain numbers or of arrays: written once, they serve one run and thousands.

A single run is priced in plain numbers, so that `shoal estimate` need not import numpy, which takes longer than its
answer; searches and fits give arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np

    Value = float | np.ndarray
    """A number of one run, or one for each of many."""

V = TypeVar("V", float, "np.ndarray")
"""The same, where all values of a formula are of one kind."""


def plain(*values: Value) -> bool:
    """Whether these are numbers."""
    return all(isinstance(value, float | int) for value in values)


@overload
def maximum(a: float, b: float) -> float: ...
@overload
def maximum(a: np.ndarray, b: Value) -> np.ndarray: ...
@overload
def maximum(a: Value, b: np.ndarray) -> np.ndarray: ...
def maximum(a: Value, b: Value) -> Value:
    """The larger."""
    return max(a, b) if plain(a, b) else _numpy().maximum(a, b)


@overload
def minimum(a: float, b: float) -> float: ...
@overload
def minimum(a: np.ndarray, b: Value) -> np.ndarray: ...
@overload
def minimum(a: Value, b: np.ndarray) -> np.ndarray: ...
def minimum(a: Value, b: Value) -> Value:
    """The smaller."""
    return min(a, b) if plain(a, b) else _numpy().minimum(a, b)


def clip(value: V, least: float, most: V) -> V:
    """No less than the one, and no more than the other."""
    return minimum(maximum(value, least), most)


@overload
def where(condition: float, yes: float, no: float) -> float: ...
@overload
def where(condition: np.ndarray, yes: Value, no: Value) -> np.ndarray: ...
def where(condition: Value, yes: Value, no: Value) -> Value:
    """The one where the condition holds, else the other; both have been computed."""
    return (yes if condition else no) if plain(condition) else _numpy().where(condition, yes, no)


@overload
def choose(code: int, among: Sequence[float]) -> float: ...
@overload
def choose(code: np.ndarray, among: Sequence[Value]) -> np.ndarray: ...
def choose(code: int | np.ndarray, among: Sequence[Value]) -> Value:
    """One of several, by its number."""
    return among[code] if isinstance(code, int) else _numpy().choose(code, among)


def ceil(value: V) -> V:
    """Rounded up."""
    return float(math.ceil(value)) if isinstance(value, float | int) else _numpy().ceil(value)


def log2(value: V) -> V:
    """Doublings."""
    return math.log2(value) if isinstance(value, float | int) else _numpy().log2(value)


def _numpy() -> ModuleType:
    import numpy as np

    return np
