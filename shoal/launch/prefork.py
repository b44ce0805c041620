"""Prefork server: a process that has imported everything and forks others, which then start without imports.

Importing torch and the trainer takes seconds of CPU time per process. The server does it once and then only waits; each
fork has its own environment, session and log. Forking is safe, as the server has a single thread, computes nothing and
never touches a device. Where its parent is such a process too, the server is a fork of it; else a new interpreter.

The parent requests processes and receives their exit codes over a socket. The forks die with the server, and the server
with its parent, however it ends. A server that no longer answers is killed.
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
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import IO, Any

from shoal.base.files import open_to_append
from shoal.engine.device import (
    allocator_environment,
    cores_per_rank,
    cuda_environment,
    die_with_parent,
    loopback,
)
from shoal.launch.forked_process import JOB_SIGNALS, ForkedProcess, is_safe_to_fork, open_streams, run_and_exit

READ_AT_START = "OMP_WAIT_POLICY"  # environment variable that OpenMP reads once, when torch is imported
START_SECONDS = 180.0  # for the first answer of a server that has to import torch, on a busy machine
ANSWER_SECONDS = 20.0  # for any other answer: the server only waits for orders
COMPILER = "torch._dynamo"  # takes a second to import; compiling, recomputing and building torch's optimizers need it
PIPE = "SHOAL_PIPE"  # environment variable with the file descriptor of a pipe passed to a process


class PreforkServerEnded(RuntimeError):
    """Error for a server process that has exited and can no longer fork."""


# ---- the parent's side -----------------------------------------------------------------------------------------------


class Child:
    """Process forked by a server, with the part of the `subprocess.Popen` interface that the parent needs."""

    def __init__(self, server: PreforkServer, pid: int):
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self._server.listen(0.0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._server.listen(1.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it just ended
                os.kill(self.pid, signum)


Process = Child | Popen


class PreforkServer:
    """Client of a prefork server, which imports in the background. Leaving the context kills the server and its forks.

    On systems whose libraries do not support forking (macOS) no server exists, and `start` starts new interpreters.

    Args:
        environment: environment of the server, if it is a new interpreter. Settings read at process start (threads,
            allocator) then apply to all forks.
        log: log file of the server's errors; None uses this process's stderr.
        may_fork: whether a fork of this process will do. Not for ranks on CUDA devices, as this process may have asked
            the driver for them.
    """

    def __init__(
        self, environment: Mapping[str, str], log: Path | None = None, preload: Iterable[str] = (), *,
        may_fork: bool = True,
    ):
        self.log, self.pid = log, 0
        if not sys.platform.startswith("linux"):
            return
        self._orders, theirs = Pipe()
        in_main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if in_main else 0  # the kernel would kill the server at the end of the starting thread
        same = environment.get(READ_AT_START) == os.environ.get(READ_AT_START)
        with theirs, _open_log(log) as file:
            stderr = file.fileno() if log else None
            if may_fork and same and is_safe_to_fork():
                run = partial(run_server, theirs, parent, preload, self._orders)
                self._process: Popen | ForkedProcess = ForkedProcess(run, stderr)
            else:
                self._process = Popen(
                    [sys.executable, "-m", "shoal.launch.prefork", str(theirs.fileno()), str(parent), *preload],
                    env=safe_environment(environment), stdin=DEVNULL, stderr=stderr, pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        self.pid = self._process.pid
        self._heard = self._asked = time.monotonic()  # when it last answered, and was last asked to
        self._patience = START_SECONDS  # until its first answer
        self._lock = threading.RLock()  # guards the connection
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
        return self.pid != 0 and self._process.poll() is not None

    def start(
        self, module: str, environment: Mapping[str, str], log: Path | None = None, *, heard: bool = True,
        pipe: int | None = None,
    ) -> Process:
        """Start ``python -m module`` in a new session, so that Ctrl-C in the terminal reaches only the parent.

        Args:
            environment: complete environment of the process.
            log: file to which its stderr is appended; None uses the server's stderr.
            heard: whether its stdout is the server's instead of the log.
            pipe: file descriptor to duplicate into the process, whose environment variable `PIPE` has its number.

        Raises:
            PreforkServerEnded: the server has exited.
            OSError: the system could not create another process.
        """
        if not self.pid:
            with _open_log(log) as file:
                return Popen(
                    [sys.executable, "-m", module], env=safe_environment(environment) | _pipe_variable(pipe),
                    stdin=DEVNULL, stdout=None if heard else file, stderr=file if log else None,
                    pass_fds=() if pipe is None else (pipe,), start_new_session=True,
                )
        with self._lock:
            try:
                self._orders.send((module, safe_environment(environment), log and str(log), heard, pipe is not None))
                self._asked = time.monotonic()
                if pipe is not None:
                    send_handle(self._orders, pipe, self.pid)
                while not self._answers:
                    if not self.listen(1.0):
                        raise self._is_gone()
            except OSError:
                raise self._is_gone() from None
            except (KeyboardInterrupt, SystemExit):
                self._process.kill()  # it may wait for the rest of the order, or answer it late
                raise
            answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _is_gone(self) -> PreforkServerEnded:
        where = f" Its log: {self.log}" if self.log else ""
        return PreforkServerEnded(f"process {self.pid}, which starts the ranks, has ended.{where}")

    def listen(self, seconds: float) -> bool:
        """Process messages from the server until one comes, at most for ``seconds``; return False at its end."""
        with self._lock:
            try:
                while self._orders.poll(seconds):
                    self._read(*self._orders.recv())
                    seconds = 0.0
                self._kill_if_silent()
            except (EOFError, OSError):
                return self._end()
            return True

    def _end(self) -> bool:
        """Reap the server, whose forks the kernel has killed, so that `ended` says so at once; return False."""
        self._process.kill()
        self._process.wait()
        for child in self._children.values():
            child.returncode = -signal.SIGKILL if child.returncode is None else child.returncode
        return False

    def _kill_if_silent(self) -> None:
        """Ask the server for an answer from time to time; kill it if it owes one for too long."""
        now = time.monotonic()
        if self._asked <= self._heard:
            if now - self._heard > ANSWER_SECONDS / 4:
                self._orders.send(None)
                self._asked = now
        elif now - self._asked > self._patience:
            print(f"process {self.pid}, which starts the ranks, does not answer; it is killed", file=sys.stderr)
            self._process.kill()

    def _read(self, what: str, value: Any = None, code: int = 0) -> None:
        self._heard, self._patience = time.monotonic(), ANSWER_SECONDS
        if what == "here":
            return
        if what == "ended":
            self._children.pop(value).returncode = code
        elif what == "started":
            child = self._children[value] = Child(self, value)
            self._answers.append(child)
        else:
            self._answers.append(OSError(f"cannot create another process: {value}"))


def _open_log(log: str | Path | None) -> IO[bytes]:
    return open(os.devnull, "ab") if log is None else open_to_append(log)


def _pipe_variable(pipe: int | None) -> dict[str, str]:
    return {} if pipe is None else {PIPE: str(pipe)}


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child interpreter that finds this shoal, and imports nothing from its current folder
    (as with ``python -P``)."""
    root = str(Path(__file__).parents[2])
    path = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]  # "" is the current one
    if root not in (*path, *sys.path[1:]):  # shoal came from the current folder
        path.append(root)
    return {**environment, "PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def end_processes(processes: Sequence[Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def local_environment(ranks: int, device: str = "") -> dict[str, str]:
    """Return this process's environment with defaults for local ranks: network interface, threads, the device's."""
    return {
        "OMP_NUM_THREADS": str(cores_per_rank(ranks)),
        "OMP_WAIT_POLICY": "passive",  # spinning threads would take cores from other processes
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
        **(allocator_environment() if device == "cpu" else cuda_environment() if device == "cuda" else {}),
        **os.environ,
    }


# ---- the server ------------------------------------------------------------------------------------------------------


def run_server(
    orders: Connection, parent: int, preload: Iterable[str], parents_end: Connection | None = None
) -> None:
    """Run the server until its parent is gone and, in its forks, the requested modules.

    Signals to all processes of a job are meant for the forks. They are blocked rather than ignored, so that a signal
    sent to a fork before it has installed its handlers stays pending.

    Args:
        parent: process with which the kernel ends this one; 0 for none.
        parents_end: the other end of the connection, if this process inherited it.
    """
    if parents_end is not None:
        parents_end.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    if parent:
        die_with_parent(parent)
    for name in preload:
        importlib.import_module(name)
    try:
        order = serve(orders)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    become(*order)
    sys.modules.pop(order[0], None)  # as in a new process, also if the parent of this server had imported it
    run_and_exit(lambda: runpy.run_module(order[0], run_name="__main__", alter_sys=True))


def serve(orders: Connection) -> tuple[str, dict[str, str], str | None, bool]:
    """Serve fork requests until the parent is gone (EOFError, OSError); return, in each fork, `become`'s arguments."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would copy the shared pages
    server = os.getpid()
    while True:
        ready = wait([orders, wake])
        if wake in ready:
            wake.recv(1 << 16)
            _report_ended(orders)
        if orders not in ready:
            continue
        if (order := orders.recv()) is None:
            orders.send(("here",))
            continue
        module, environment, log, heard, has_pipe = order
        pipe = recv_handle(orders) if has_pipe else None
        try:
            pid = os.fork()
        except OSError as error:
            orders.send(("failed", str(error)))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
                for end in (orders, wake, woken):
                    end.close()
                die_with_parent(server)
                return module, environment | _pipe_variable(pipe), log, heard
            orders.send(("started", pid))
        if pipe is not None:
            os.close(pipe)


def become(module: str, environment: dict[str, str], log: str | None, heard: bool) -> None:
    """Set up session, output, environment and arguments of a fork like a new process's."""
    os.setsid()
    if log is not None:
        try:
            file: IO[bytes] = open_to_append(log)
        except OSError:  # a full disk, or a link
            file = _open_log(None)
        with file:
            os.dup2(file.fileno(), 2)
            if not heard:
                os.dup2(file.fileno(), 1)
    open_streams()
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = [module]


def _report_ended(orders: Connection) -> None:
    with suppress(ChildProcessError):  # no fork left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            orders.send(("ended", ended[0], os.waitstatus_to_exitcode(ended[1])))


if __name__ == "__main__":
    run_server(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
