"""A process forked from this one, which has everything imported and needs no second for it."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # those that a job manager may send to all its processes


def is_safe_to_fork() -> bool:
    """Return whether a fork of this process works like a new one: on Linux, as long as it has only this thread.

    Threads do not exist in a fork, but the locks that they hold do. Those of OpenMP start with the first operator that
    uses them, and a fork would wait for them for ever. Other systems' libraries do not support forking.
    """
    return sys.platform.startswith("linux") and len(os.listdir("/proc/self/task")) == 1


class ForkedProcess:
    """Fork of this process that calls a function and exits, with the part of `subprocess.Popen` that its parent needs.

    It has a session and signal handlers of its own, an empty stdin, and does nothing that was registered for the end of
    this process. `JOB_SIGNALS` are blocked in it, so that none is lost: ``run`` unblocks them if it wants them.

    Args:
        run: what the fork does. An exception is printed, and its exit code is 1.
        stderr: file descriptor that replaces stderr.
    """

    def __init__(self, run: Callable[[], object], stderr: int | None = None):
        self.returncode: int | None = None
        for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            stream.flush()

        def begin_and_run() -> None:
            _begin(stderr)
            run()

        gc.collect()  # finalizers of garbage run here, not a second time in the fork
        before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                run_and_exit(begin_and_run)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self.returncode if self.returncode is not None else self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.returncode if self.returncode is not None else self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # this process was started with SIGCHLD ignored: the kernel has reaped it
            pid, status = self.pid, 0
        self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _begin(stderr: int | None) -> None:
    """Set up a fork as the system sets up a new process."""
    atexit._clear()
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    if stderr is not None:
        os.dup2(stderr, 2)
    open_streams()
    signal.set_wakeup_fd(-1)
    for signum in (*JOB_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def open_streams() -> None:
    """Open stdout and stderr once more, with the same settings, in a fork whose parent had other files there.

    A stream keeps what it found out about its file, such as whether it can seek.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if (inherited := getattr(sys, f"__{name}__")) is not None:
            stream = open(descriptor, "w", encoding=inherited.encoding, errors=inherited.errors, closefd=False)  # noqa: SIM115
            lines, through = inherited.line_buffering or stream.line_buffering, inherited.write_through
            stream.reconfigure(line_buffering=lines, write_through=through)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Call a function and exit as an interpreter does after a program, but leave memory to the kernel.

    To take apart the modules that a fork shares with its parent, an interpreter would copy their pages first, which
    takes as long as some ten steps of a small model.
    """
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            code = error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # that of a rank records what ended it
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # as `multiprocessing` does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
