"""Requests to stop: the signals that ask for one, counted until there is a moment to answer them."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

PREEMPTED = 75
"""The exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of <sysexits.h>."""


class StopRequests:
    """Counts the signals that ask this process to stop. As a context: before and after, signals do what they did."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self):
        self.count = 0
        self.preempted = False  # by another signal than Ctrl-C's: somebody will start the run again

    def listen(self, *signals: signal.Signals) -> None:
        """From now on these are counted; without a name all of them."""
        for signum in signals or self.SIGNALS:
            signal.signal(signum, self._on_signal)

    def __enter__(self) -> StopRequests:
        self._former = {signum: signal.getsignal(signum) for signum in self.SIGNALS}
        self.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self.preempted |= signum != signal.SIGINT
