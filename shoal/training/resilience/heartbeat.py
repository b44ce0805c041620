"""Heartbeats: a record in a memory-mapped file that a rank writes and its supervisor reads.

A thread of the rank writes the time five times a second: while it does, the process runs. The main thread writes its
current action and increments a counter: while the counter grows, the rank makes progress. Neither blocks, a mark costs
one to three microseconds, and the record of a dead rank shows its last action.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path

from shoal.base.files import write_atomically
from shoal.pipeline.program import Action, Op

PERIOD = 0.2  # seconds between heartbeats
ASKED = "trace-asked"  # file beside the records: their ranks write a trace of their collectives
OPS = list(Op)
DESCRIPTIONS = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward to the input",
    Op.BACKWARD_WEIGHT: "backward to the weights", Op.SEND_FORWARD: "sending activations",
    Op.RECV_FORWARD: "receiving activations", Op.SEND_BACKWARD: "sending gradients",
    Op.RECV_BACKWARD: "receiving gradients", Op.REDUCE: "reducing gradients", Op.STEP: "the optimizer's step",
    Op.GATHER: "gathering parameters",
}


class Phase(IntEnum):
    """Phase of a rank's run."""

    START = 0  # rendezvous, data, model construction, loading a state
    STEP = 1
    VALIDATE = 2
    SAVE = 3
    END = 4  # after the last step
    DONE = 5  # finished; the process may exit
    LEFT = 6  # a peer was lost: it has left all groups and waits for the next generation

    def __str__(self) -> str:
        return ("starting", "in a step", "validating", "saving", "ending", "done", "waiting for the others")[self]


@dataclass(frozen=True)
class HeartbeatRecord:
    """Last record of a rank. Times are from `time.monotonic` [s], which all processes of a machine share."""

    pid: int
    alive: float  # last heartbeat
    marked: float  # last progress
    count: int  # progress counter
    phase: Phase
    begun: int  # steps done when the process started or resumed; -1 until known
    steps: int  # steps done
    seconds: float  # spent in this process's steps
    op: int = -1  # index in `OPS` of the current action in a step, whose numbers follow; -1 between actions
    stage: int = -1
    microbatch: int = -1
    part: int = -1
    version: int = -1

    @property
    def action(self) -> Action | None:
        """Current action in a step; None between actions."""
        if not 0 <= self.op < len(OPS):
            return None
        return Action(OPS[self.op], self.stage, self.microbatch, self.part, self.version)

    @property
    def last_sign(self) -> float:
        """Time of its last heartbeat or progress."""
        return max(self.alive, self.marked)

    @property
    def joined(self) -> bool:
        """Whether it has made a mark since the start of its process: it has joined the world."""
        return self.count > 1

    @property
    def where(self) -> str:
        """Position for messages: ``in step 17, forward of micro-batch 3 on stage 1`` (the first step is 1)."""
        if self.phase is not Phase.STEP:
            return f"{self.phase} after step {self.steps}" if self.begun >= 0 else str(self.phase)
        return f"in step {self.steps + 1}" + (f", {describe_action(self.action)}" if self.action else "")


class _MappedRecord(ctypes.Structure):
    """File format: fields of 8 bytes, each read and written atomically."""

    _fields_ = [  # integers, then times: a supervisor may read records that an earlier version of shoal wrote
        (f.name, ctypes.c_double if f.type == "float" else ctypes.c_int64)
        for f in sorted(fields(HeartbeatRecord), key=lambda f: f.type == "float")
    ]


class Heartbeat:
    """Writer of a rank's heartbeat record; also a `Recorder` of its runtime's actions.

    Without a path (a rank without supervisor), the record is in memory only.

    Args:
        trace: returns a trace of the rank's collectives, which the thread writes when it is asked for (`ASKED`).
    """

    def __init__(self, path: Path | None = None, trace: Callable[[], bytes] | None = None):
        size = ctypes.sizeof(_MappedRecord)
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            path.unlink(missing_ok=True)  # an earlier rank may still have it mapped
            with open(path, "xb+") as file:
                file.write(bytes(size))  # space of a full disk: without it, a mark would raise SIGBUS
                file.flush()
                self._map = mmap.mmap(file.fileno(), size)
        self._record = _MappedRecord.from_buffer(self._map)
        self._record.begun = self._record.op = -1
        self._mark()
        self._record.alive = time.monotonic()
        self._record.pid = os.getpid()  # last: readers ignore a record without pid
        self._closed = threading.Event()
        if path is not None:
            threading.Thread(target=self._beat, args=(path, trace), name="beat", daemon=True).start()

    def phase(self, phase: Phase) -> None:
        self._record.op = -1
        self._record.phase = phase
        self._mark()

    def begun(self, steps: int) -> None:
        """Record that the process starts after ``steps`` steps."""
        self._record.steps = self._record.begun = steps
        self._mark()

    def stepped(self, steps: int, seconds: float) -> None:
        """Record that ``steps`` steps are done, and the seconds spent in this process's steps."""
        self._record.op = -1
        self._record.seconds = seconds
        self._record.steps = steps
        self._mark()

    def begin(self, action: Action) -> None:
        record = self._record
        record.op = OPS.index(action[0])
        record.stage, record.microbatch, record.part, record.version = action[1:]
        self._mark()

    def arrived(self, action: Action) -> None:
        self._mark()

    def end(self, action: Action) -> None:
        self._record.op = -1
        self._mark()

    def _mark(self) -> None:
        self._record.count += 1
        self._record.marked = time.monotonic()

    def close(self) -> None:
        """End the heartbeats of this record; the process continues with another."""
        self._closed.set()

    def _beat(self, path: Path, trace: Callable[[], bytes] | None) -> None:
        asked, written = path.with_name(ASKED), trace_path(path)
        while not self._closed.wait(PERIOD):
            self._record.alive = time.monotonic()
            if trace and asked.exists() and not written.exists():
                with suppress(OSError, RuntimeError):  # a full disk, or no trace: the watchdog does without
                    write_atomically(written, trace())


def describe_action(action: Action) -> str:
    """Describe an action.

    >>> describe_action(Action(Op.FORWARD, 1, 3))
    'forward of micro-batch 3 on stage 1'
    """
    of = f" of micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    part = f", slice {action.part}," if action.part >= 0 else ""
    on = f" on stage {action.stage}" if action.stage >= 0 else ""
    return f"{DESCRIPTIONS[action.op]}{of}{part}{on}"


def record_path(scratch: Path, rank: int) -> Path:
    return scratch / f"beat-{rank}"


def trace_path(record: Path) -> Path:
    """Return the file beside a rank's record in which it answers `ASKED`."""
    return record.with_name(f"trace-{record.name}")


def read(path: Path) -> HeartbeatRecord | None:
    """Read a record; None if it does not exist yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < ctypes.sizeof(_MappedRecord):
        return None
    raw = _MappedRecord.from_buffer_copy(data)
    if not raw.pid:
        return None
    record = HeartbeatRecord(*(getattr(raw, field.name) for field in fields(HeartbeatRecord)))
    return replace(record, phase=Phase(record.phase))
