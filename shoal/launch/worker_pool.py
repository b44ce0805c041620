"""A pool of worker processes that runs a function on n ranks in well under a second.

Importing torch costs seconds, joining a process group costs milliseconds. So the workers are forks of a process that
has imported it, started once and kept, and each call gets a fresh process group of exactly the ranks that it asked for.

    def total() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    with Pool(8) as pool:
        pool.run(total, 4)  # [4.0, 4.0, 4.0, 4.0]
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from shoal.engine.device import destroy_world, init_world, loopback
from shoal.launch.forkserver import LOOK, become_worker, worker_context

START_SECONDS = 180.0  # to import torch, on a machine that is busy
GRACE_SECONDS = 5.0  # for the peers of a failed rank to fail in turn


class RankError(Exception):
    """A call failed on some ranks; the message gives each one's cause, the first failure first.

    Attributes:
        failures: ``(rank, cause)`` in the order of the message; a cause is a remote traceback, or how the rank died.
    """

    def __init__(self, name: str, ranks: int, failures: list[tuple[int, str]]):
        self.failures = failures
        first, *others = [f"--- rank {rank}: {cause.rstrip()}" for rank, cause in failures]
        later = ["", "Then, perhaps only because a peer had left:", *others] if others else []
        super().__init__("\n".join([f"{name} failed on {len(failures)} of {ranks} ranks", first, *later]))


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stack: Path  # where faulthandler writes when the worker is asked for its stack
    ready: bool = False


class Pool:
    """Worker processes for calls on up to ``size`` ranks, started when first needed and kept until closed.

    No worker outlives the parent. The workers run on the CPU with one torch thread each.

    Args:
        size: the most ranks that a call can ask for.
        setup: called once in each new worker (such as `shoal.engine.cpu_tuning.tune_process`).
    """

    def __init__(self, size: int, setup: Callable[[], object] | None = None):
        self.size = size
        self._setup = setup
        self._context = worker_context()
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-")
        self._serial = count()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()
        self._folder.cleanup()

    def run(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``fn(*args)`` on ranks ``0 .. ranks - 1`` of a fresh default process group (gloo).

        Args:
            fn: a function that pickles by reference: one defined at the top of a module. It learns its rank from
                ``torch.distributed``.
            ranks: processes in the group.
            args: the same for every rank; must pickle.
            timeout: seconds for the whole call; collectives time out after three quarters of it, so that a rank that
                hangs is told apart from those that wait for it.

        Returns:
            Each rank's return value, in the order of the ranks.

        Raises:
            RankError: a rank raised, died or hung. Ranks that died, hung or could not join are replaced; the
                pool goes on working.
            ValueError: ``ranks`` is not in ``1 .. size``.
            TypeError: ``fn`` or an argument does not pickle.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"ranks = {ranks}: this pool runs 1 to {self.size}")
        try:
            call = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{fn!r} or its arguments do not pickle (lambda? nested function?): {error}") from error
        self._start(ranks)
        store = str(Path(self._folder.name, f"store-{next(self._serial)}"))
        waiting = dict(enumerate(self._workers[:ranks]))
        try:
            for rank, worker in waiting.items():
                _send(worker, (sys.path, rank, ranks, store, timeout, call))
            return _Collect(getattr(fn, "__qualname__", repr(fn)), waiting, timeout).results()
        finally:
            for worker in waiting.values():  # whoever has not finished, also on Ctrl-C here
                _end(worker)
            Path(store).unlink(missing_ok=True)

    def _start(self, ranks: int) -> None:
        """Have ``ranks`` live workers, all ready."""
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        while len(self._workers) < ranks:
            here, there = self._context.Pipe()
            stack = Path(self._folder.name, f"stack-{next(self._serial)}")
            process = self._context.Process(
                target=_serve, args=(there, dict(os.environ), stack, self._setup), name="shoal-pool-worker", daemon=True
            )
            process.start()
            there.close()  # so that the pipe ends when the worker does
            self._workers.append(_Worker(process, here, stack))
        deadline = time.monotonic() + START_SECONDS
        for worker in self._workers[:ranks]:
            if not worker.ready:
                if not worker.pipe.poll(deadline - time.monotonic()) or not _receive(worker):
                    _end(worker)
                    raise RuntimeError(f"a worker process did not start: {_cause_of_death(worker.process)}")
                worker.ready = True


class _Collect:
    """The answers to one call. Takes out of ``waiting`` every rank that finished, in whatever way."""

    def __init__(self, name: str, waiting: dict[int, _Worker], timeout: float):
        self.name, self.waiting, self.ranks = name, waiting, len(waiting)
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.values: dict[int, Any] = {}
        self.died: list[tuple[int, str]] = []
        self.raised: list[tuple[float, int, str]] = []

    def results(self) -> list[Any]:
        while self.waiting and (left := self.deadline - time.monotonic()) > 0:
            for pipe in wait([worker.pipe for worker in self.waiting.values()], min(left, LOOK)):
                self._take(next(rank for rank, worker in self.waiting.items() if worker.pipe is pipe))
        hung = [(rank, _stack_of(worker)) for rank, worker in self.waiting.items() if not self._has_raised(rank)]
        # A rank that died or hung explains the others' errors; among errors the earliest does.
        failures = self.died + hung + [(rank, cause) for _, rank, cause in sorted(self.raised)]
        if failures:
            raise RankError(self.name, self.ranks, failures)
        return [self.values[rank] for rank in range(self.ranks)]

    def _take(self, rank: int) -> None:
        worker = self.waiting[rank]
        message = _receive(worker)
        if message is None:
            if not self._has_raised(rank):
                self.died.append((rank, _cause_of_death(worker.process)))
            self._hurry()
            _end(self.waiting.pop(rank))
            return
        kind, payload = message
        if kind == "raised":  # the worker still has to leave the group
            self.raised.append((payload[0], rank, payload[1]))
            self._hurry()
        else:
            self.values[rank] = payload
            del self.waiting[rank]

    def _has_raised(self, rank: int) -> bool:
        return any(rank == raised for _, raised, _ in self.raised)

    def _hurry(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)


# Plain pickle and bytes on the pipe: torch registers shared-memory reductions with multiprocessing's own pickler, and
# those would tie a result's life to its worker's file descriptors.


def _send(worker: _Worker, message: Any) -> None:
    try:
        worker.pipe.send_bytes(pickle.dumps(message))
    except (BrokenPipeError, ConnectionResetError):
        return  # the end of the worker is seen when its answer is read


def _receive(worker: _Worker) -> Any:
    """The next message, or None if the worker is gone."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _cause_of_death(process: BaseProcess) -> str:
    process.join(GRACE_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code} before it answered"


def _stack_of(worker: _Worker) -> str:
    """Where a hung worker hangs: it writes its stacks when it gets SIGUSR1."""
    assert worker.process.pid is not None  # it was started
    os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + GRACE_SECONDS
    while not worker.stack.read_text().rstrip() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # for the rest of the lines
    return f"hung and was killed; its stack then, last call first:\n{worker.stack.read_text()}"


# ---- in the worker ---------------------------------------------------------------------------------------------


def _serve(
    pipe: Connection, environment: dict[str, str], stack: Path, setup: Callable[[], object] | None
) -> None:
    become_worker(environment)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    if setup is not None:
        setup()
    with open(stack, "w") as file:
        _take_signals(file)
        gc.freeze()  # what is imported by now stays, and need not be looked through after each run
        pipe.send_bytes(pickle.dumps("ready"))
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            _take_signals(file)  # anew: the last call may have taken them for itself
            imported = len(sys.modules)
            if not _answer(pipe, *pickle.loads(message)):
                return
            if len(sys.modules) > imported:  # which stay too
                gc.collect()
                gc.freeze()


def _take_signals(stack: IO[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=stack)


def _answer(pipe: Connection, path: list[str], rank: int, ranks: int, store: str, timeout: float, call: bytes) -> bool:
    """Do one call as one of its ranks. Whether this process can take another: torch counts the groups that it began to
    make in the names under which it looks for its peers, so one that could not join finds nobody any more."""
    sys.path[:] = path  # modules that the parent can import by now (a test's folder) can be imported here
    value = pickle.dumps(("finished", None))
    fit = True
    try:
        fn, args = pickle.loads(call)
        fit = False
        init_world(rank, ranks, dist.FileStore(store, ranks), "cpu", 0.75 * timeout)
        fit = True
        value = pickle.dumps(("finished", fn(*args)))
        if dist.is_initialized():
            dist.barrier()  # nobody closes a connection that a peer still reads from
    except BaseException:
        # Before this rank leaves the group and its peers fail: the cause must be first.
        pipe.send_bytes(pickle.dumps(("raised", (time.monotonic(), traceback.format_exc()))))
    gc.collect()  # groups that are left in reference cycles would keep their threads and connections
    destroy_world()
    if fit:
        pipe.send_bytes(value)
    return fit
