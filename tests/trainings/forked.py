"""Commands and ranks as forks of one process that has imported what they need: a test does not pay for imports.

The code that runs is that of ``python -m shoal`` or of torchrun, in a process and a session of its own; what is left
out is starting an interpreter, for the command and for torchrun's workers. That is in
`test_local_launcher` (ranks that meet), in `tests.cli.run.test_train` (torchrun), in `tests.base.test_terminal` (the
reader of a command) and in the tests of bad input.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main as torchrun

from shoal.cli.main import main as shoal
from shoal.launch import worker_pool
from shoal.launch.forked_process import JOB_SIGNALS, ForkedProcess
from shoal.launch.local_launcher import PRELOADED
from shoal.launch.prefork import Child, PreforkServer

ORDER = "SHOAL_TEST_COMMAND"
ROOT = str(Path(__file__).parents[2])


class Polled:
    """What waits for a process that can be asked whether it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("shoal", timeout)
            time.sleep(0.002)
        return code


class Command(Polled):
    """A command that was forked: the part of `subprocess.Popen` that tests need."""

    def __init__(self, child: Child, log: Path):
        self.pid, self.args, self.log, self._child = child.pid, (), log, child

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        return self._child.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.log.read_text(), None

    def send_signal(self, signum: int) -> None:
        self._child.send_signal(signum)

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)


@cache
def folder() -> Path:
    """Where commands write what they say, for as long as this process lives."""
    made = tempfile.mkdtemp(prefix="shoal-tests-")  # a `TemporaryDirectory` would end in a fork that forgets `atexit`'s
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def server() -> PreforkServer:
    """The process that forks commands, ranks and the workers of pools; it ends with this one.

    It is a fork of this process, which has imported nearly all of it for its tests.
    """
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    made = PreforkServer(environment, preload=[*PRELOADED, *worker_pool.PRELOADED, "tests.trainings.in_forks"])
    atexit.register(made.__exit__, None, None, None)
    return made


def command(
    words: list[str], environment: Mapping[str, str], cwd: Path, agent: tuple[str, ...] = (), terminal: str = "",
    script: str = "",
) -> Command:
    """Start ``shoal WORDS``; or torchrun with the words of ``agent`` and then these, whose workers are forks of it.

    Args:
        script: a file that is run instead, as by ``python FILE``.
        terminal: a pseudo-terminal, which becomes the controlling one of the command.
    """
    log = Path(tempfile.mkstemp(dir=folder(), suffix=".log")[1])
    order = json.dumps({"words": words, "cwd": str(cwd), "agent": agent, "terminal": terminal, "script": script})
    environment = {**environment, ORDER: order, "OMP_WAIT_POLICY": "passive"}  # as `server` has
    child = server().start("tests.trainings.forked", environment, log, heard=False)
    return Command(child, log)


# ---- in the fork -----------------------------------------------------------------------------------------------------


class Worker(ForkedProcess, Polled):
    """A worker of torchrun: ``python -u -m MODULE WORDS``."""

    wait = Polled.wait

    def __init__(self, args: tuple[str, ...], env: Mapping[str, str], **_: object):
        module, *words = args[args.index("-m") + 1 :]

        def run() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2:  # as `subprocess` does: else the agent's connections would outlive it
                    with suppress(OSError):  # that of the list itself
                        os.close(descriptor)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        super().__init__(run)


def main() -> int:
    """The command."""
    order = json.loads(os.environ.pop(ORDER))
    os.chdir(order["cwd"])
    os.umask(0o022)  # as most users have
    if order.get("terminal"):
        opened = os.open(order["terminal"], os.O_RDWR)  # the first that the leader of a session opens controls it
        for descriptor in range(3):
            os.dup2(opened, descriptor)
        os.close(opened)
    # For good. pytest's own streams, which the fork of a test has, write elsewhere.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    if order["agent"]:
        subprocess_handler.Popen = Worker
        # It searches all loaded modules for a name in its log. A fork has thousands: half a second for each entry.
        dynamic_rendezvous.get_method_name = lambda depth=2: "no_method"
        return torchrun([*order["agent"], *order["words"]])
    if order["script"]:
        runpy.run_path(order["script"], run_name="__main__")
        return 0
    sys.argv = ["shoal", *order["words"]]
    return shoal(order["words"])


if __name__ == "__main__":
    sys.exit(main())
