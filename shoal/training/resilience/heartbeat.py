"""A rank's signs of life: a few numbers in a mapped file, which its supervisor reads without disturbing it.

A thread of the rank writes the time, five times a second: so long as it does, the process runs. The main thread writes
what it is at, and counts: so long as the count grows, the rank gets on. Neither waits for anything, a mark costs one to
three microseconds, and a rank that died leaves the last thing that it did.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from shoal.pipeline.program import Action, Op

PERIOD = 0.2  # seconds between signs of life
OPS = list(Op)
WORDS = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward to the input",
    Op.BACKWARD_WEIGHT: "backward to the weights", Op.SEND_FORWARD: "sending activations",
    Op.RECV_FORWARD: "receiving activations", Op.SEND_BACKWARD: "sending gradients",
    Op.RECV_BACKWARD: "receiving gradients", Op.REDUCE: "reducing gradients", Op.STEP: "the optimizer's step",
    Op.GATHER: "gathering parameters",
}

# Places of the record: numbers of 8 bytes, which are written and read whole.
PID, COUNT, PHASE, STEPS, BEGUN, OP, STAGE, MICROBATCH, PART, VERSION, ALIVE, MARKED, SECONDS = range(13)
_BYTES = 8 * 13


class Phase(IntEnum):
    """What a rank is at."""

    START = 0  # rendezvous, data, building the model, loading a state
    STEP = 1
    VALIDATE = 2
    SAVE = 3
    END = 4  # after the last step
    DONE = 5  # nothing is left to do: now the process may end

    def __str__(self) -> str:
        return ("starting", "in a step", "validating", "saving", "ending", "done")[self]


@dataclass(frozen=True)
class HeartbeatRecord:
    """What a rank last wrote of itself; times are of `time.monotonic`, which is one clock for the machine."""

    pid: int
    alive: float
    """When the process last gave a sign of life [s]."""

    marked: float
    """When it last got on [s]."""

    count: int
    """How often it got on."""

    phase: Phase
    begun: int
    """Steps that were done when it began or resumed; -1 before that is known."""

    steps: int
    """Steps that are done."""

    seconds: float
    """Spent in the steps that it did itself."""

    action: Action | None
    """What it is at in a step; None between actions."""

    @property
    def where(self) -> str:
        """For messages: ``in step 17, forward of micro-batch 3 on stage 1`` (the first step is 1)."""
        if self.phase is not Phase.STEP:
            return f"{self.phase} after step {self.steps}" if self.begun >= 0 else str(self.phase)
        return f"in step {self.steps + 1}" + (f", {in_words(self.action)}" if self.action else "")


class Beat:
    """The writing side, for the rank itself; also a `Recorder` of its runtime's actions.

    Args:
        path: of the record; None keeps it to itself (a rank that nobody supervises).
    """

    def __init__(self, path: Path | None = None):
        if path is None:
            self._map = mmap.mmap(-1, _BYTES)
        else:
            path.unlink(missing_ok=True)  # an earlier rank's, who may still have it mapped
            with open(path, "xb+") as file:
                file.truncate(_BYTES)
                self._map = mmap.mmap(file.fileno(), _BYTES)
        view = memoryview(self._map)
        self._whole, self._real = view.cast("q"), view.cast("d")
        self._whole[BEGUN] = self._whole[OP] = -1
        self._mark()
        self._sign()
        self._whole[PID] = os.getpid()  # last: a record without it is not read
        if path is not None:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    # ---- what the rank is at -----------------------------------------------------------------------------------

    def phase(self, phase: Phase) -> None:
        """The rank begins something else."""
        self._whole[OP] = -1
        self._whole[PHASE] = phase
        self._mark()

    def begun(self, steps: int) -> None:
        """So many steps are done, of this process none."""
        self._whole[STEPS] = self._whole[BEGUN] = steps
        self._mark()

    def stepped(self, steps: int, seconds: float) -> None:
        """So many steps are done; those of this process took so long together [s]."""
        self._whole[OP] = -1
        self._real[SECONDS] = seconds
        self._whole[STEPS] = steps
        self._mark()

    def begin(self, action: Action) -> None:
        """As `Recorder`."""
        numbers = self._whole
        numbers[OP] = OPS.index(action[0])
        numbers[STAGE], numbers[MICROBATCH], numbers[PART], numbers[VERSION] = action[1:]
        self._mark()

    def arrived(self, action: Action) -> None:
        """As `Recorder`."""
        self._mark()

    def end(self, action: Action) -> None:
        """As `Recorder`."""
        self._whole[OP] = -1
        self._mark()

    def _mark(self) -> None:
        self._whole[COUNT] += 1
        self._real[MARKED] = time.monotonic()

    def _sign(self) -> None:
        self._real[ALIVE] = time.monotonic()

    def _beat(self) -> None:
        while True:
            time.sleep(PERIOD)
            self._sign()


def in_words(action: Action) -> str:
    """An action in a sentence.

    >>> in_words(Action(Op.FORWARD, 1, 3))
    'forward of micro-batch 3 on stage 1'
    """
    of = f" of micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    part = f", slice {action.part}," if action.part >= 0 else ""
    on = f" on stage {action.stage}" if action.stage >= 0 else ""
    return f"{WORDS[action.op]}{of}{part}{on}"


def record_path(scratch: Path, rank: int) -> Path:
    """Where a rank keeps its record."""
    return scratch / f"beat-{rank}"


def read(path: Path) -> HeartbeatRecord | None:
    """What a record says; None where there is none yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _BYTES:
        return None
    whole, real = memoryview(data).cast("q"), memoryview(data).cast("d")
    if not whole[PID]:
        return None
    action = None
    if 0 <= whole[OP] < len(OPS):
        action = Action(OPS[whole[OP]], whole[STAGE], whole[MICROBATCH], whole[PART], whole[VERSION])
    return HeartbeatRecord(
        whole[PID], real[ALIVE], real[MARKED], whole[COUNT], Phase(whole[PHASE]), whole[BEGUN], whole[STEPS],
        real[SECONDS], action,
    )
