"""Two computations in two host threads, of which one runs at a time: it gives its turn while its transfer travels.

A pipeline can pair a forward with the backward of another micro-batch, so that one computes while the other's rows
travel to their experts or back (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1; torchtitan's `dual_pipe_v.py` also takes
two threads). Turns change only at fixed points, whether or not a transfer has arrived: so all ranks start the
collectives of a group in the same order, and nothing that both computations use needs a lock. On CUDA both queue their
work on the same stream, where the wait for a transfer comes after what the other computation queued meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue

import torch

from shoal.engine.streams import current_stream


class OtherFailed(BaseException):
    """Raised where a computation would get its turn back, if the other one has failed or was interrupted."""


class Turns:
    """Two computations that take turns: the first in the calling thread, the second in a thread of this object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None  # whose thread ends with this object
        self._reset()

    def _reset(self) -> None:
        self._turn = 0  # of the computation that runs
        self._go: tuple[SimpleQueue[None], SimpleQueue[None]] = (SimpleQueue(), SimpleQueue())  # to wait for one's turn
        self._running = [False, False]
        self._error: BaseException | None = None

    def run(self, first: Callable[[], object], second: Callable[[], object], device: torch.device) -> None:
        """Run both computations; the first begins.

        Raises:
            BaseException: what either of them raised first, or what interrupted the calling thread. The other one has
                then ended too, at its next turn.
        """
        if self._pool is None:
            threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(1, "pair", lambda: torch.set_num_threads(threads))
        self._reset()
        self._running = [True, True]
        ended = self._pool.submit(self._run_second, second, current_stream(device))
        try:
            try:
                first()
            except BaseException as error:
                self._fail(error)  # before the other one continues
            self._end(0)
            wait([ended])
        except BaseException as error:
            self._fail(error)
        while not ended.done():  # its turn comes, and it sees the error; further interrupts change nothing
            with suppress(BaseException):
                self._go[1].put(None)
                wait([ended])
        failure, self._error = self._error, None
        if failure is not None:
            raise failure

    def _run_second(self, second: Callable[[], object], stream: AbstractContextManager[object]) -> None:
        self._go[1].get()
        try:
            if self._error is None:
                with stream:
                    second()
        except BaseException as error:
            self._fail(error)
        self._end(1)

    def give(self) -> None:
        """Let the other computation run until it gives the turn back or ends; without one, do nothing.

        The thread of the caller may be another one, such as autograd's of a device: only one computation runs.

        Raises:
            OtherFailed: the other one ended by an exception.
        """
        own = self._turn
        if not self._running[own]:
            return
        if self._error is None and self._running[1 - own]:
            self._turn = 1 - own
            self._go[1 - own].put(None)
            self._go[own].get()
        if self._error is not None:
            raise OtherFailed

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _end(self, own: int) -> None:
        """Give the turn for good; a computation that waits for it continues, or ends if this one failed."""
        self._running[own] = False
        if self._running[1 - own]:
            self._turn = 1 - own
            self._go[1 - own].put(None)
