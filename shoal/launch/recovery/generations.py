"""Generations of one rank's process: when a peer is lost, it leaves its groups and joins the next generation.

Process, imports, device context, allocator and compiled code stay; the model is built again and takes the newest saved
state. Ranks also meet again, without a loss, to let lost replicas join. The supervisor sends orders through a pipe: the
environment of the next generation as JSON, or an empty one to leave the current one. A signal interrupts a rank that
computes; a rank that waits for others gets an error: every rank that leaves closes its connections, so waits in gloo
end one after the other. NCCL is aborted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import torch.distributed as dist

from shoal.base.errors import UsageError, list_causes
from shoal.engine.collectives.shm.progress import PeerLost
from shoal.engine.device import abort_device_groups
from shoal.launch.devices import check_device
from shoal.launch.prefork import PIPE

LEAVE: dict[str, str] = {}  # order to leave the current generation
LOG = "SHOAL_LOG"  # variable of an order: file for the output of a process that takes another rank
READY = "SHOAL_READY"  # variable of a spare: file that it creates once it has computed on the device `TRIED`
TRIED = "SHOAL_TRIED"
INTERRUPT = signal.SIGURG  # ignored by default, and used by no library
AGAIN_SECONDS = 0.1  # until another interrupt: a callback may have swallowed the exception


class Abandoned(BaseException):
    """Raised in the main thread when the supervisor ends a generation."""


class Orders:
    """Receiver of the supervisor's orders, in a thread. Create it in the main thread.

    Raises:
        UsageError: this process has no supervisor.
    """

    def __init__(self) -> None:
        self._next: SimpleQueue[dict[str, str]] = SimpleQueue()
        self._inside = False  # whether the main thread is in a generation
        self._outside = threading.Event()  # set when it leaves one
        self._given, self._entered = int("RANK" in os.environ), 0  # generations, of which a spare has none yet
        self._main = threading.main_thread().ident or 0
        self._stdout = os.dup(1)  # of rank 0, which any process may become
        self._take_log()
        signal.signal(INTERRUPT, self._on_signal)
        pipe = os.environ.pop(PIPE, "")
        if not pipe:
            raise UsageError("this process was started neither by shoal nor by torchrun or srun.")
        threading.Thread(target=self._receive, args=(int(pipe),), name="orders", daemon=True).start()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Let orders interrupt the enclosed code, by `Abandoned`."""
        self._outside.clear()
        self._inside = True
        self._entered += 1
        try:
            yield
        finally:
            self._inside = False
            self._outside.set()

    def next(self) -> None:
        """Wait for the next generation and take its environment, and its log if it has another rank."""
        os.environ.update(self._next.get())
        self._take_log()

    def _take_log(self) -> None:
        if log := os.environ.pop(LOG, ""):
            end = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(end, 2)
            os.dup2(self._stdout if os.environ["RANK"] == "0" else end, 1)
            os.close(end)

    def _receive(self, pipe: int) -> None:
        with open(pipe) as lines:
            for line in lines:
                if order := json.loads(line):
                    self._given += 1
                    self._next.put(order)
                else:
                    self._interrupt()

    def _interrupt(self) -> None:
        """Interrupt the main thread until it has left the newest generation, which it may not have entered yet."""
        while self._inside or self._entered < self._given:
            wait = self._outside.wait if self._inside else time.sleep
            abort_device_groups()
            signal.pthread_kill(self._main, INTERRUPT)
            wait(AGAIN_SECONDS)  # not longer than it takes to leave: the next order may have come

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._inside:
            raise Abandoned


def get_ready() -> None:
    """Compute on the device of a lost rank, if this spare is to take its place, and say so (`READY`).

    A request to stop that comes before its first generation does not end it: that reads the request (`StopRequests`).
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ready := os.environ.pop(READY, ""):
        check_device(os.environ.pop(TRIED))
        Path(ready).touch()


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an exception may be the consequence of another rank's end.

    >>> is_peer_loss(PeerLost("all-reduce of [4] over ranks [0, 1]: rank 1 has ended")), is_peer_loss(KeyError("x"))
    (True, False)
    """
    return any(
        isinstance(each, Abandoned | PeerLost | dist.DistError)
        or (isinstance(each, RuntimeError) and "gloo" in str(each))
        for each in list_causes(error)
    )


def forget(error: BaseException) -> None:
    """Release what the frames of an exception, and of those before it, refer to."""
    for each in list_causes(error):
        traceback.clear_frames(each.__traceback__)
