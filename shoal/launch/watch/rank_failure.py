"""How the ranks of an attempt ended, and which of them was the cause."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from typing import Any

from shoal.training.resilience.heartbeat import HeartbeatRecord


@dataclass(frozen=True)
class Failure:
    """How one rank ended: the cause of all, or what followed from it."""

    rank: int
    code: int  # as subprocess gives it: negative for a signal
    when: float = float("inf")  # monotonic clock of the machine, where the rank recorded it
    report: str = ""  # the traceback that the rank recorded, or the stack that was got from it
    trouble: str = ""  # why it was ended, where it did not end by itself
    since: float = float("inf")  # when it was last well, by the same clock, where it was ended
    record: HeartbeatRecord | None = None  # its last sign of life

    @property
    def order(self) -> tuple[bool, float]:
        """Smallest for the first cause.

        A rank that only lost a peer fails by an exception, which it records, or by the abort of a communication
        library. Any other end is a cause, even if a peer was faster to record what followed from it.
        """
        return (not self.sure, self.when)

    @property
    def sure(self) -> bool:
        """Whether it cannot be what followed from another's end."""
        return bool(self.trouble) or not (self.report or self.code == -signal.SIGABRT)

    @property
    def how(self) -> str:
        """``was killed by SIGKILL``, ``exited with code 1``, or why it was ended."""
        if self.trouble:
            return self.trouble
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}" + (", though it was not done" if self.code == 0 else "")

    def describe(self) -> str:
        """The traceback that it recorded, or else how it ended, with its stack if there is one."""
        return self.report if self.report and not self.trouble else f"{self.how}\n{self.report}"

    @property
    def where(self) -> str:
        """What it was at, as far as it is known."""
        return "" if self.record is None else f" {self.record.where} (on {socket.gethostname()})"

    @property
    def step(self) -> int | None:
        """Steps that were done; None where none had begun."""
        return None if self.record is None or self.record.begun < 0 else self.record.steps

    def event(self) -> dict[str, Any]:
        """The values of the run's event of it."""
        return {
            "rank": self.rank, "host": socket.gethostname(), "how": self.how, "step": self.step,
            "where": self.record and self.record.where, "report": self.report or None,
        }


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        code: an exit code of this process.
        cause: the rank that failed first; None where none failed.
        furthest: steps that some rank had done; -1 where none had begun.
    """

    code: int
    cause: Failure | None
    furthest: int

    @property
    def usage(self) -> bool:
        """Whether what was asked for cannot be."""
        return self.cause is not None and self.cause.code == 2 and bool(self.cause.report)
