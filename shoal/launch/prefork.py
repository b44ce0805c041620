"""A process that has imported everything and forks the ranks of a run: a restart then costs no imports.

Importing torch and the trainer takes seconds of a core for each rank. The nursery does it once and then only waits; a
rank is a fork of it, with an environment, a session and a log of its own. That is sound since the nursery has a single
thread, computes nothing and never touches a device: what a fork cannot take along is not there yet.

The supervisor orders ranks and learns how they ended over a socket, a line of JSON each. Ranks die with the nursery,
and the nursery with its supervisor, however that ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import TracebackType
from typing import Any

from shoal.engine.device import die_with_parent

PRELOADED = (
    "shoal.launch.preload", "shoal.training.trainer", "shoal.training.async_dp.trainers", "shoal.training.check",
    "torch.utils.tensorboard",
)
LEFT_TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # which may be sent to every process of a job
BYTES = 1 << 16


class NurseryEnded(RuntimeError):
    """It can fork no more."""


# ---- the supervisor's side -------------------------------------------------------------------------------------------


class Child:
    """A rank that a nursery forked: the part of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, nursery: Nursery, pid: int):
        self.pid, self._nursery = pid, nursery
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._nursery.listen(0.0)
        return self.returncode

    def wait(self) -> int:
        """The exit code, when it has ended."""
        while self.returncode is None:
            self._nursery.listen(None)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Nothing is sent to one that has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:  # it ended just now
                return

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


class Nursery:
    """Starts a nursery, which imports while the caller goes on. Leaving the context ends it and its ranks.

    Args:
        environment: of the process: what is read when one starts (threads, the allocator) is the same for all ranks.
        log: the file where the nursery itself writes what goes wrong.
    """

    def __init__(self, environment: Mapping[str, str], log: Path):
        self.log = log
        self._socket, theirs = socket.socketpair()
        with theirs, open(log, "a") as file:
            self._process = Popen(
                [sys.executable, "-m", "shoal.launch.prefork", str(theirs.fileno()), str(os.getpid())],
                env=dict(environment), stdin=DEVNULL, stderr=file, pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._unread = b""
        self._answers: list[Child | OSError] = []
        self._children: dict[int, Child] = {}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def fork(self, module: str, environment: Mapping[str, str], log: Path, *, heard: bool) -> Child:
        """Start ``python -m module`` as a fork.

        Args:
            environment: the whole of it.
            log: where its stderr goes, at the end of the file.
            heard: its stdout is the supervisor's, not the log.

        Raises:
            NurseryEnded: before it could.
            OSError: the system has no room for another process.
        """
        order = {"module": module, "environment": dict(environment), "log": str(log), "heard": heard}
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            raise NurseryEnded(f"process {self.pid}, which starts the ranks, has ended. Its log: {self.log}") from None
        while not self._answers:
            if not self.listen(None):
                raise NurseryEnded(f"process {self.pid}, which starts the ranks, has ended. Its log: {self.log}")
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def listen(self, seconds: float | None) -> bool:
        """Hear what the nursery has to tell, for at most so long (None: until there is something).

        Returns:
            False once it is gone, and all its ranks with it.
        """
        if not select.select([self._socket], [], [], seconds)[0]:
            return True
        try:
            told = self._socket.recv(BYTES)
        except ConnectionResetError:
            told = b""
        if not told:
            for child in self._children.values():
                child.returncode = -signal.SIGKILL if child.returncode is None else child.returncode
            return False
        *lines, self._unread = (self._unread + told).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ended" in message:
                self._children.pop(message["ended"]).returncode = message["code"]
            elif "started" in message:
                child = self._children[message["started"]] = Child(self, message["started"])
                self._answers.append(child)
            else:
                self._answers.append(OSError(f"no process for a rank: {message['failed']}"))
        return True


# ---- the nursery -----------------------------------------------------------------------------------------------------


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork until the supervisor is gone; returns in each rank its order, and None in the nursery."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in LEFT_TO_RANKS:
        signal.signal(signum, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in one rank would otherwise copy the pages that all share
    unread, here = b"", os.getpid()
    while True:
        ready = select.select([orders, wake], [], [])[0]
        if wake in ready:
            wake.recv(BYTES)
            _tell_ended(orders)
        if orders not in ready:
            continue
        if not (told := orders.recv(BYTES)):
            return None
        *lines, unread = (unread + told).split(b"\n")
        for line in lines:
            # What a fork is sent before it has its own handlers waits: the kernel throws away what is ignored.
            signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_RANKS)
            try:
                pid = os.fork()
            except OSError as error:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)
                _tell(orders, failed=str(error))
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
                    signal.signal(signum, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)
                for end in (orders, wake, woken):
                    end.close()
                die_with_parent(here)
                return json.loads(line)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)
            _tell(orders, started=pid)


def become(order: dict[str, Any]) -> None:
    """Make this fork what a process of its own would be."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 2)
    if not order["heard"]:
        os.dup2(log, 1)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.argv = [order["module"]]


def _tell_ended(orders: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(orders, ended=pid, code=os.waitstatus_to_exitcode(status))


def _tell(orders: socket.socket, **message: Any) -> None:
    orders.sendall(json.dumps(message).encode() + b"\n")


def preload() -> None:
    """Import what ranks will need."""
    for name in PRELOADED:
        importlib.import_module(name)


def main() -> None:
    """The nursery, and in its forks the rank."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    preload()
    if (order := serve(orders)) is not None:
        become(order)
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
