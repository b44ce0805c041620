"""Prefetch data for the next step in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Items by number, prefetched one ahead. Each must be a pure function of its number.

    The thread ends with this object, or with the program.

    >>> squares = Prefetcher(lambda number: number**2, stop=5)
    >>> squares(2), squares(3)  # 3 is computed meanwhile
    (4, 9)

    Args:
        make: computes an item; calls do not overlap.
        stop: the first number that is not prefetched.
    """

    def __init__(self, make: Callable[[int], T], stop: int):
        self._make, self._stop = make, stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-ahead")
        self._made: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        """Return item ``number`` and start to compute the next one. Errors from computing the item are raised here."""
        item = self._made.pop(number, None) or self._thread.submit(self._make, number)
        following = number + 1
        started = self._made.pop(following, None)
        for other in self._made.values():
            other.cancel()
        self._made = {}
        if following < self._stop:
            self._made[following] = started or self._thread.submit(self._make, following)
        return item.result()
