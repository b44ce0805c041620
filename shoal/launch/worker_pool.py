"""Pool of worker processes that runs a function on n ranks in well under a second.

The workers are forks of a process that has imported torch, which takes seconds. They are kept between calls, and each
call gets a new process group of the requested size.

    def total() -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    with Pool(8) as pool:
        pool.run(total, 4)  # [4.0, 4.0, 4.0, 4.0]
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from shoal.launch.prefork import COMPILER, PreforkServer, Process, end_processes, local_environment
from shoal.launch.watch.rank_failure import Failure
from shoal.launch.watch.watchdog import collect_stacks

PRELOADED = [  # by the server of all pools
    "shoal.engine.collectives.ops", "shoal.engine.models.transformer", "shoal.launch.preload", COMPILER,
]
START_SECONDS = 180.0  # time to import torch on a busy machine
GRACE_SECONDS = 5.0  # time for the peers of a failed rank to fail
LONGEST_WAIT = 3600.0  # per wait: `multiprocessing.connection.wait` does not accept timeouts of weeks

_server: PreforkServer | None = None


def shared_server() -> PreforkServer:
    """Return the process that forks the workers of all pools; it ends with this process."""
    global _server
    if _server is None or _server.ended:
        _server = PreforkServer(os.environ, preload=PRELOADED)
    return _server


class RankError(Exception):
    """Error for a call that failed on some ranks.

    Attributes:
        failures: ``(rank, cause)``, first failure first; a cause is a remote traceback or how the rank died.
    """

    def __init__(self, name: str, ranks: int, failures: list[tuple[int, str]]):
        self.failures = failures
        first, *others = [f"--- rank {rank}: {cause.rstrip()}" for rank, cause in failures]
        later = ["", "Then, perhaps only because a peer was lost:", *others] if others else []
        super().__init__("\n".join([f"{name} failed on {len(failures)} of {ranks} ranks", first, *later]))

    @property
    def reason(self) -> str:
        """First cause in one line: the exception without its traceback, or how the rank died."""
        _, frames, last = self.failures[0][1].rpartition("Traceback (most recent call last):\n")
        return next(line for line in last.splitlines() if not (frames and line.startswith("  ")))


@dataclass
class _Worker:
    process: Process
    pipe: Connection
    stack: Path  # stack file, written on request
    ready: bool = False

    def send(self, message: Any) -> None:
        # Plain pickle and bytes: torch registers shared-memory reductions with multiprocessing's own pickler, and those
        # would tie a result's life to its worker's file descriptors.
        try:
            self.pipe.send_bytes(pickle.dumps(message))
        except (BrokenPipeError, ConnectionResetError):
            return  # noticed when its answer is read

    def receive(self) -> Any:
        """Return the next message, or None if the worker is gone."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def end(self) -> int:
        """Kill the worker if it still runs; return its exit code."""
        end_processes([self.process])
        self.pipe.close()
        return self.process.wait()


class Pool:
    """Worker processes for calls on up to ``size`` ranks, started when first needed and kept until closed.

    No worker outlives the parent. Each has one torch thread.

    Args:
        size: maximum number of ranks of a call.
        setup: function called once in each new worker (such as `shoal.engine.device.tune_process`).
        keep_group: whether all calls use the same ranks, which then keep the first process group until a call fails.
        server: server that forks the workers, instead of `shared_server`.
        device: "cpu" or "cuda": where the ranks of `run` compute. More ranks than CUDA devices share them, and need a
            mesh with the transport of `shoal.engine.device.choose_transport`.
    """

    def __init__(
        self, size: int, setup: Callable[[], object] | None = None, *, keep_group: bool = False,
        server: PreforkServer | None = None, device: str = "cpu",
    ):
        self.size, self.device = size, device
        self._setup, self._keep_group, self._server = setup, keep_group, server
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-")
        self._serial = count()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._folder.cleanup()

    def run(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``fn(*args)`` on ranks ``0 .. ranks - 1`` of a new default process group.

        Args:
            fn: a function defined at the top level of a module. It gets its rank from ``torch.distributed``.
            args: arguments, equal for every rank; must pickle.
            timeout: seconds for the full call; collectives time out after three quarters of it, which distinguishes a
                rank that hangs from ranks that wait for it.

        Returns:
            Each rank's return value, in the order of the ranks.

        Raises:
            RankError: a rank raised, died or hung. Ranks that cannot be used again are replaced.
            ValueError: ``ranks`` is not in ``1 .. size``.
            TypeError: ``fn`` or an argument does not pickle.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"ranks = {ranks}: this pool runs 1 to {self.size}")
        store = Path(self._folder.name, f"store-{next(self._serial)}")
        call = _pickled(fn, args)
        group = ranks, self.device, str(store), 0.75 * timeout, self._keep_group
        calls = [(call, (rank, *group)) for rank in range(ranks)]
        try:
            return self._do(fn, calls, timeout)
        finally:
            if not self._keep_group:
                shutil.rmtree(store, ignore_errors=True)

    def map(
        self, fn: Callable[[Any], Any], items: Sequence[Any], *, timeout: float = 60.0,
        done: Callable[[int, Any], None] = lambda number, value: None, stop_early: bool = False,
    ) -> list[Any]:
        """Call ``fn`` on each item, without a process group, on as many workers in parallel as the pool has.

        Args:
            timeout: seconds for all items.
            done: callback that receives each item's index and value on completion.
            stop_early: end the other calls soon after the first failure.

        Raises:
            RankError: see `run`; its "ranks" are the indices of the items.
        """
        return self._do(fn, [(_pickled(fn, (item,)), None) for item in items], timeout, done, stop_early)

    def _do(
        self, fn: Callable[..., Any], calls: Sequence[tuple[bytes, tuple | None]], timeout: float,
        done: Callable[[int, Any], None] = lambda number, value: None, stop_early: bool = True,
    ) -> list[Any]:
        workers = self._ready(min(self.size, len(calls)))
        call = _Call(calls, timeout, done, stop_early)
        try:
            return call.results(workers, getattr(fn, "__qualname__", repr(fn)))
        finally:
            for worker in call.busy.values():  # unfinished workers, also after Ctrl-C in this process
                worker.end()

    def _ready(self, number: int) -> list[_Worker]:
        """Return ``number`` live workers that are waiting for a call."""
        self._workers = [worker for worker in self._workers if worker.process.poll() is None]
        server = self._server or shared_server()  # before the pipes: it would inherit and keep open the workers' ends
        while len(self._workers) < number:
            own_end, worker_end = Pipe()
            environment = local_environment(self.size, self.device)
            with worker_end:
                process = server.start("shoal.launch.pool_worker", environment, pipe=worker_end.fileno())
            worker = _Worker(process, own_end, Path(self._folder.name, f"stack-{next(self._serial)}"))
            worker.send((os.getcwd(), sys.path, worker.stack, pickle.dumps(self._setup)))
            self._workers.append(worker)
        deadline = time.monotonic() + START_SECONDS
        for worker in self._workers[:number]:
            if not worker.ready:
                if not worker.pipe.poll(deadline - time.monotonic()) or not worker.receive():
                    ends = time.monotonic() + GRACE_SECONDS
                    while worker.process.poll() is None and time.monotonic() < ends:
                        time.sleep(0.01)  # an interpreter that has closed its pipe is about to exit with its own code
                    raise RuntimeError(f"a worker process did not start: it {Failure(0, worker.end()).how}")
                worker.ready = True
        return self._workers[:number]


class _Call:
    """One call on some workers.

    Args:
        calls: by index (of a rank or an item), the pickled function with its arguments, and the process group.
        stop_early: give the others only `GRACE_SECONDS` after a failure.

    Attributes:
        busy: unfinished workers by index.
    """

    def __init__(
        self, calls: Sequence[tuple[bytes, tuple | None]], timeout: float, done: Callable[[int, Any], None],
        stop_early: bool,
    ):
        self.calls, self.done, self.stop_early = calls, done, stop_early
        self.deadline = time.monotonic() + timeout
        self.busy: dict[int, _Worker] = {}
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._todo: Iterator[int] = iter(range(len(calls)))

    def _begin_next(self, worker: _Worker) -> None:
        number = next(self._todo, None)
        if number is not None:
            self.busy[number] = worker
            worker.send((sys.path, *self.calls[number]))

    def results(self, workers: list[_Worker], name: str) -> list[Any]:
        """Return the values in order; raise `RankError` if a call failed or timed out."""
        for worker in workers:
            self._begin_next(worker)
        while self.busy and (left := self.deadline - time.monotonic()) > 0:
            for pipe in wait([worker.pipe for worker in self.busy.values()], min(left, LONGEST_WAIT)):
                self._take(next(number for number, worker in self.busy.items() if worker.pipe is pipe))
        hung = {number: worker for number, worker in self.busy.items() if number not in self.failures}
        stopped = self.failures and all(group is None for _, group in self.calls)  # they did not hang, nor wait
        if hung and not stopped:
            pids, files = {n: w.process.pid for n, w in hung.items()}, {n: w.stack for n, w in hung.items()}
            trouble = "hung and was killed; its stack, last call first:"
            for number, stack in collect_stacks(pids, files).items():
                self.failures[number] = Failure(number, 0, report=stack, trouble=trouble)
        if self.failures:
            # A worker that ended without a report is a cause, also one that aborted: only what raised may be a peer's.
            ordered = sorted(self.failures.values(), key=lambda failure: (bool(failure.report), *failure.order))
            raise RankError(name, len(self.calls), [(failure.rank, failure.describe()) for failure in ordered])
        return [self.values[number] for number in range(len(self.calls))]

    def _take(self, number: int) -> None:
        worker = self.busy[number]
        message = worker.receive()
        if message is None:
            del self.busy[number]
            self._fail(Failure(number, worker.end()))
        elif message[0] == "raised":
            self._fail(Failure(number, 1, *message[1:]))  # the worker still has to leave the group
        else:
            del self.busy[number]
            if number not in self.failures:
                self.values[number] = message[1]
                self.done(number, message[1])
            self._begin_next(worker)

    def _fail(self, failure: Failure) -> None:
        self.failures.setdefault(failure.rank, failure)
        if self.stop_early:
            self._todo = iter(())
            self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{fn!r} or its arguments do not pickle (lambda? nested function?): {error}") from error
