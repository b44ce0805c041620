"""A save in the background: a rank's own part, and waits for other ranks, of which one may be lost."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
PARTING_SECONDS = 0.05  # in which a wait ends after the loss of a rank, if gloo notices it


_awaited: set[Future[Any]] = set()  # for which the end of the process waits
atexit.register(lambda: wait(_awaited))


def run_in_thread(name: str, function: Callable[..., T], *args: Any, awaited: bool = False) -> Future[T]:
    """Call a function in a thread.

    Args:
        awaited: whether the end of the process waits for it.
    """
    future: Future[T] = Future()
    if awaited:
        _awaited.add(future)
        future.add_done_callback(_awaited.discard)

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def leave_save(pending: Future[Any] | None, own: Callable[[], bool]) -> bool:
    """Wait until a save needs only other ranks, of which one was lost; return whether it has ended.

    gloo does not always notice that a rank has ended during a transfer, and then waits until its timeout.

    Args:
        own: whether the save is at this rank's own part.
    """
    until = time.monotonic() + PARTING_SECONDS
    while pending and not pending.done() and (own() or time.monotonic() < until):
        time.sleep(0.005)
    if pending is not None:
        _awaited.discard(pending)
    return pending is None or pending.done()
