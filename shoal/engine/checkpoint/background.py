"""A save in the background, which is left if it takes too long after the loss of a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Concatenate, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class LeftSave(Exception):
    """Raised in the thread of a save that was left."""


class BackgroundSave(Generic[T]):
    """A save that runs in a thread.

    Args:
        function: what the thread calls, with this object as first argument, to mark what can be left (`leavable`).
        awaited: whether the end of the process waits for the save, unless it was left.
    """

    def __init__(
        self, function: Callable[Concatenate[BackgroundSave[T], P], T], name: str, awaited: bool, *args: P.args,
        **kwargs: P.kwargs,
    ):  # fmt: skip
        self._future: Future[T] = Future()
        self._leavable = self._left = False
        self._needless = threading.Event()  # set once nothing has to wait for the thread

        def run() -> None:
            try:
                self._future.set_result(function(self, *args, **kwargs))
            except LeftSave:
                self._future.cancel()  # its traceback would keep the copied state alive
            except BaseException as error:
                self._future.set_exception(error)
            finally:
                self._needless.set()

        # A thread that may have to be left is a daemon. Another one, which is not, keeps the process for it.
        threading.Thread(target=run, name=name, daemon=True).start()
        if awaited:
            threading.Thread(target=self._needless.wait, name=f"{name} awaited").start()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """Wait for the end of the save; return its result or raise its error, `CancelledError` if it was left."""
        return self._future.result()

    @contextmanager
    def leavable(self) -> Iterator[None]:
        """Mark code of the thread that may still run after the process continued without this save.

        Raises:
            LeftSave: it did: the thread must end without touching anything more.
        """
        self._leavable = True
        try:
            yield
        finally:
            self._leavable = False  # then look: `leave` looks in the other order
            if self._left:
                raise LeftSave

    def leave(self, seconds: float) -> bool:
        """Wait for the save after the loss of a rank, and give it up; return whether it has ended.

        gloo does not always notice that a rank has ended during a transfer, and then waits until its timeout. So the
        thread may stay in code that can be left; it ends with that code or the process. Other code is waited for.

        Args:
            seconds: how long to wait for code that can be left.
        """
        self._wait(time.monotonic() + seconds)
        self._left = True
        self._wait(0.0)  # it came out of this code just before
        self._needless.set()
        return self.done

    def _wait(self, until: float) -> None:
        while not self.done and not (self._leavable and time.monotonic() > until):
            time.sleep(0.005)
