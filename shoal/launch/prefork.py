"""A process that has imported everything and forks others, so that starting one of them costs no imports.

Importing torch and the trainer takes seconds of a core for each process. The server does it once and then only waits;
what it forks has an environment, a session and a log of its own. That is sound since the server has a single thread,
computes nothing and never touches a device.

Its parent orders processes and learns how they ended over a socket. They die with the server, and the server with its
parent, however that ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from shoal.engine.cpu_tuning import allocator_environment
from shoal.engine.device import die_with_parent, loopback, share_of_cores

LEFT_TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # which may be sent to every process of a job
PIPE = "SHOAL_PIPE"
"""In the environment of a process that was given a pipe: the number of its file descriptor."""


class PreforkServerEnded(RuntimeError):
    """It can fork no more."""


# ---- the parent's side -----------------------------------------------------------------------------------------------


class Child:
    """A process that a server forked: the part of `subprocess.Popen` that its parent needs."""

    def __init__(self, server: PreforkServer, pid: int):
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.listen(0.0)
        return self.returncode

    def wait(self) -> int:
        """The exit code, when it has ended."""
        while self.returncode is None:
            self._server.listen(None)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Nothing is sent to one that has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:  # it ended just now
                return


Process = Child | Popen


class PreforkServer:
    """Starts a server, which imports while the caller goes on. Leaving the context ends it and what it forked.

    Where the system's libraries do not stand a fork (macOS) there is none, and `start` starts interpreters.

    Args:
        environment: of the server: what a process reads when it starts (threads, the allocator) is the same for all.
        log: where the server writes what goes wrong; None is this process's stderr.
        preload: modules to import.
    """

    def __init__(self, environment: Mapping[str, str], log: Path | None = None, preload: Iterable[str] = ()):
        self.log, self.pid = log, 0
        if not sys.platform.startswith("linux"):
            return
        self._orders, theirs = Pipe()
        in_main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if in_main else 0  # the kernel would end the server with the thread that started it
        with theirs, open(log or os.devnull, "a") as file:
            self._process = Popen(
                [sys.executable, "-m", "shoal.launch.prefork", str(theirs.fileno()), str(parent), *preload],
                env=dict(environment), stdin=DEVNULL, stderr=file if log else None,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )
        self.pid = self._process.pid
        self._lock = threading.RLock()  # of what is sent and read
        self._answers: list[Child | OSError] = []
        self._children: dict[int, Child] = {}

    def __enter__(self) -> PreforkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self._process.kill()
            self._process.wait()
            self._orders.close()

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self.pid != 0 and self._process.poll() is not None

    def start(
        self, module: str, environment: Mapping[str, str], log: Path | None = None, *, heard: bool = True,
        pipe: int | None = None,
    ) -> Process:
        """Start ``python -m module`` in a session of its own: Ctrl-C in the terminal reaches the parent alone.

        Args:
            environment: the whole of it.
            log: where its stderr goes, at the end of the file; None is the server's own.
            heard: its stdout is the server's, not the log.
            pipe: a file descriptor that it gets a copy of, whose number is in its environment as `PIPE`.

        Raises:
            PreforkServerEnded: before it could.
            OSError: the system has no room for another process.
        """
        if not self.pid:
            with open(log or os.devnull, "a") as file:
                return Popen(
                    [sys.executable, "-m", module], env={**environment, **_pipe_variable(pipe)}, stdin=DEVNULL,
                    stdout=None if heard else file, stderr=file if log else None,
                    pass_fds=() if pipe is None else (pipe,), start_new_session=True,
                )
        with self._lock:
            try:
                self._orders.send((module, dict(environment), log and str(log), heard, pipe is not None))
                if pipe is not None:
                    send_handle(self._orders, pipe, self.pid)
            except OSError:
                raise self._is_gone() from None
            try:
                while not self._answers:
                    if not self.listen(None):
                        raise self._is_gone()
            except KeyboardInterrupt:
                self._process.kill()  # else its answer would be taken for that to the next order
                raise
            answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _is_gone(self) -> PreforkServerEnded:
        where = f" Its log: {self.log}" if self.log else ""
        return PreforkServerEnded(f"process {self.pid}, which starts the ranks, has ended.{where}")

    def listen(self, seconds: float | None) -> bool:
        """Read what the server has to say, for at most so long (None: until there is something).

        Returns:
            False once it is gone, and with it all that it forked.
        """
        with self._lock:
            try:
                while self._orders.poll(seconds):
                    self._read(*self._orders.recv())
                    seconds = 0.0
            except (EOFError, ConnectionResetError):
                for child in self._children.values():
                    child.returncode = -signal.SIGKILL if child.returncode is None else child.returncode
                return False
            return True

    def _read(self, what: str, value: Any, code: int = 0) -> None:
        if what == "ended":
            self._children.pop(value).returncode = code
        elif what == "started":
            child = self._children[value] = Child(self, value)
            self._answers.append(child)
        else:
            self._answers.append(OSError(f"no process for a rank: {value}"))


def _pipe_variable(pipe: int | None) -> dict[str, str]:
    return {} if pipe is None else {PIPE: str(pipe)}


def end_processes(processes: Sequence[Process]) -> None:
    """Kill those that still run, and wait for all."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def local_environment(ranks: int, device: str = "") -> dict[str, str]:
    """The variables of each of so many ranks of this machine: the network, threads and, on the CPU, the allocator.

    What this process has in its own environment comes first.
    """
    return {
        "OMP_NUM_THREADS": str(share_of_cores(ranks)),
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait take the cores of whatever else runs
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
        **(allocator_environment() if device == "cpu" else {}),
        **os.environ,
    }


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(orders: Connection) -> tuple[str, dict[str, str], str | None, bool]:
    """Fork for ever; returns in each fork its order, the arguments of `become`.

    Raises:
        EOFError, OSError: the parent is gone.
    """
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # a collection in one fork would otherwise copy the pages that all share
    server = os.getpid()
    while True:
        ready = wait([orders, wake])
        if wake in ready:
            wake.recv(1 << 16)
            _report_ended(orders)
        if orders not in ready:
            continue
        module, environment, log, heard, has_pipe = orders.recv()
        pipe = recv_handle(orders) if has_pipe else None
        try:
            pid = os.fork()
        except OSError as error:
            orders.send(("failed", str(error)))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)
                for end in (orders, wake, woken):
                    end.close()
                die_with_parent(server)
                return module, environment | _pipe_variable(pipe), log, heard
            orders.send(("started", pid))
        if pipe is not None:
            os.close(pipe)


def become(module: str, environment: dict[str, str], log: str | None, heard: bool) -> None:
    """Make this fork what a process of its own would be."""
    os.setsid()
    if log is not None:
        end = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(end, 2)
        if not heard:
            os.dup2(end, 1)
        os.close(end)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = [module]


def _report_ended(orders: Connection) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        orders.send(("ended", pid, os.waitstatus_to_exitcode(status)))


def main() -> None:
    """The server, and in its forks what was ordered."""
    # Signals that a job's processes all get are for the forks. Blocked and not ignored: what a fork is sent before it
    # has its own handlers waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_RANKS)
    orders = Connection(int(sys.argv[1]))
    if parent := int(sys.argv[2]):
        die_with_parent(parent)
    for name in sys.argv[3:]:
        importlib.import_module(name)
    try:
        order = serve(orders)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    become(*order)
    runpy.run_module(order[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
