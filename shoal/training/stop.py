"""Stop requests: count signals until the end of a step."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed: EX_TEMPFAIL of <sysexits.h>."""


REQUESTED = "stop"
"""File beside the heartbeats of a run's ranks that their parent creates before it asks them to stop."""

TOGETHER_SECONDS = 0.2
"""Signals within this time are one request: `timeout` and other wrappers signal a process, and then its group."""

REGROUP = "regroup"
"""File beside it that their parent creates so that they keep their state and meet again in another layout."""


class StopRequests:
    """Counter of signals that request a stop. As a context manager, it restores the previous handlers on exit.

    Args:
        requested: file without which a signal is ignored: one rank that stops ends the run of all.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, requested: Path | None = None):
        self.requested = requested
        self.count = 0
        self._counted = -math.inf  # when the last one was
        self.preempted = False  # by a signal other than Ctrl-C's: the run will be restarted

    @property
    def ends(self) -> bool:
        """Whether the run is to end. A process that was between two generations may have missed the signal."""
        return self.count > 0 or (self.requested is not None and self.requested.exists())

    @property
    def asked(self) -> bool:
        """Whether the run is to end, or its ranks to meet again, after the current step."""
        return self.ends or (self.requested is not None and self.requested.with_name(REGROUP).exists())

    def listen(self, *signals: signal.Signals) -> None:
        """Count these signals from now on (default: all). Only a program's main thread can: another one trains on."""
        if threading.current_thread() is threading.main_thread():
            for signum in signals or self.SIGNALS:
                signal.signal(signum, self._on_signal)

    def __enter__(self) -> StopRequests:
        self._former = {signum: signal.getsignal(signum) for signum in self.SIGNALS}
        self.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The second signal of a request may still come, and would end a process that has saved its run.
        time.sleep(max(0.0, self._counted + TOGETHER_SECONDS - time.monotonic()))
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._former.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None and not self.requested.exists():
            name = signal.Signals(signum).name
            os.write(2, f"{name} ignored: only the parent of the ranks can stop the run\n".encode())
            return
        if (now := time.monotonic()) - self._counted >= TOGETHER_SECONDS:
            self.count, self._counted = self.count + 1, now
        self.preempted |= signum != signal.SIGINT
