"""Records of how the ranks of an attempt ended, and which of them caused the failure."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from typing import Any

from shoal.training.resilience.heartbeat import HeartbeatRecord


@dataclass(frozen=True)
class Failure:
    """End of one rank: the cause of the failure, or its consequence."""

    rank: int
    code: int  # as in subprocess, negative for a signal
    # time recorded by the rank, or when it was last well if it was killed [s, `time.monotonic`]
    when: float = float("inf")
    report: str = ""  # traceback recorded by the rank, or stack collected from it
    trouble: str = ""  # why it was killed, if it did not end by itself
    record: HeartbeatRecord | None = None  # its last heartbeat
    # whether it found NaN or infinite values (`DivergenceError`); the report is then the diagnosis
    diverged: bool = False
    # files of what the ranks of the attempt, or of the host, have recorded (`keep_recordings`)
    recordings: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key, smallest for the root cause.

        A rank that only lost a peer fails with an exception, which it records, or with an abort of a communication
        library. Any other end is a root cause, even if a peer recorded its consequence earlier.
        """
        return (not self.sure, self.when)

    @property
    def sure(self) -> bool:
        """Whether it cannot be the consequence of another rank's end."""
        return bool(self.trouble) or not (self.report or self.code == -signal.SIGABRT)

    @property
    def how(self) -> str:
        """Description of the end: ``was killed by SIGKILL``, ``exited with code 1``, or why it was killed."""
        if self.trouble:
            return self.trouble
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}" + (", though it was not done" if self.code == 0 else "")

    def describe(self) -> str:
        """Return the recorded traceback, or else how the rank ended, with its stack if available."""
        return self.report if self.report and not self.trouble else f"{self.how}\n{self.report}"

    @property
    def where(self) -> str:
        """Last known position of the rank in the run; "" if unknown."""
        return "" if self.record is None else f" {self.record.where} (on {socket.gethostname()})"

    def event(self) -> dict[str, Any]:
        """Return the values of the failure event; its step is None if the rank had not started any."""
        record = self.record
        return {
            "rank": self.rank, "host": socket.gethostname(), "how": self.how,
            "step": record.steps if record and record.begun >= 0 else None, "where": record and record.where,
            "report": self.report or None,
        } | ({"recordings": [*self.recordings]} if self.recordings else {})


@dataclass(frozen=True)
class Ending:
    """End of an attempt."""

    code: int  # exit code for this process
    cause: Failure | None  # rank that failed first; None if none failed
    furthest: int  # largest number of steps done by a rank; -1 if none had started
    regrouped: bool = False  # whether all ranks have left, as they were asked to, and wait for the next attempt

    @property
    def usage(self) -> bool:
        return self.cause is not None and self.cause.code == 2 and bool(self.cause.report)
