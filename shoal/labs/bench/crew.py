"""Contenders in processes of their own, which stay and wait while others run.

A contender keeps its processes for the whole race: what it compiled, its allocator's heap, its optimizer states.
Between its turns they are blocked on a pipe, so that they take no time from the others.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import destroy_world, init_world, loopback, peak_memory
from shoal.launch.forkserver import LOOK, become_worker, worker_context

Step = Callable[[int], float]

TIMEOUT = 300.0  # seconds for the first step, which may compile; collectives give up a little earlier
PATIENCE = 10.0  # times as long as its longest step so far may each further one take


class Failed(RuntimeError):
    """A contender could not be built or raised in a step; the message has its traceback.

    Attributes:
        reason: the same in one line, without it.
    """

    def __init__(self, who: str, reason: str, cause: str = ""):
        super().__init__(f"{who}: {cause or reason}")
        self.reason = f"{who}: {reason}"


class Work(Protocol):
    """What the steps of a contender do, as a race counts it."""

    @property
    def tokens(self) -> int:
        """In one step."""

    @property
    def flops(self) -> int:
        """Of one step."""


W = TypeVar("W", bound=Work)


@dataclass(frozen=True)
class Contender(Generic[W]):
    """One way to do the work.

    Attributes:
        name: for the table.
        build: from (workload, rank, ranks) to a step; a top-level function or a `functools.partial` of one.
        ranks: processes.
        threads: of torch in each.
        tuned: whether its processes are set as shoal sets its ranks (`shoal.engine.cpu_tuning`).
        products: if so, whether with the library of products too, or with the allocator alone.
        workload: what it processes.
    """

    name: str
    build: Callable[[W, int, int], Step]
    workload: W
    ranks: int = 1
    threads: int = 1
    tuned: bool = True
    products: bool = True


@dataclass(frozen=True)
class ContenderTurn:
    """Some consecutive steps of one contender.

    Attributes:
        seconds: of each step, on the slowest rank.
        cpu_seconds: of each step, all threads of all ranks: what others do on a busy machine hardly changes it.
        losses: the mean loss of each step [nats].
        memory: most bytes that the largest process has had in memory since it started; of memory that ranks share, its
            part by their number.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    memory: int = 0


class ContenderProcesses:
    """The processes of one contender. Use as a context manager: they end with it."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self._done = 0
        self._longest = 0.0  # seconds of a step so far
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        context = worker_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(contender.ranks):
            here, there = context.Pipe()
            store = str(Path(self._folder.name, "store"))
            arguments = (there, dict(os.environ), contender, rank, store)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> ContenderProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, steps: int) -> ContenderTurn:
        """Do the next ``steps`` steps.

        Raises:
            Failed: on any rank; or they take so much longer than those before that it must hang.
        """
        if self._done == 0 and steps > 1:  # the first one tells how long the others may take
            first, others = self._run(1), self._run(steps - 1)
            return ContenderTurn(
                first.seconds + others.seconds, first.cpu_seconds + others.cpu_seconds, first.losses + others.losses,
                others.memory,
            )
        return self._run(steps)

    def _run(self, steps: int) -> ContenderTurn:
        for pipe in self._pipes:
            with suppress(BrokenPipeError, ConnectionResetError):  # it ended: its answer, which waits, says why
                pipe.send((self._done, steps))
        self._done += steps
        turns = self._answers(TIMEOUT + PATIENCE * steps * self._longest)
        seconds = [max(ranks) for ranks in zip(*(turn.seconds for turn in turns), strict=True)]
        self._longest = max(self._longest, *seconds)
        return ContenderTurn(
            seconds,
            [sum(ranks) for ranks in zip(*(turn.cpu_seconds for turn in turns), strict=True)],
            [sum(ranks) for ranks in zip(*(turn.losses for turn in turns), strict=True)],
            max(turn.memory for turn in turns),
        )

    def _answers(self, limit: float) -> list[ContenderTurn]:
        """Each rank's own turn, in so many seconds."""
        answers: dict[Connection, ContenderTurn] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            found = wait(waiting, min(max(0.0, deadline - time.monotonic()), LOOK))
            ready = [pipe for pipe in waiting if pipe in found]
            if not ready and time.monotonic() >= deadline:
                raise Failed(self.contender.name, f"no answer in {limit:.0f} s")
            for pipe in ready:
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answer = ("its process died",)
                if not isinstance(answer, ContenderTurn):
                    raise Failed(f"{self.contender.name}, rank {self._pipes.index(pipe)}", *answer)
                answers[pipe] = answer
        return [answers[pipe] for pipe in self._pipes]


def _serve(pipe: Connection, environment: dict[str, str], contender: Contender, rank: int, store: str) -> None:
    become_worker(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    torch.set_num_threads(contender.threads)
    if contender.tuned:
        tune_process(products=contender.products)
    try:
        if contender.ranks > 1:
            shared = dist.FileStore(store, contender.ranks)
            init_world(rank, contender.ranks, shared, "cpu", 0.9 * TIMEOUT)
        step = contender.build(contender.workload, rank, contender.ranks)
        while True:
            first, count = pipe.recv()
            pipe.send(_run(step, range(first, first + count)))
    except EOFError:
        destroy_world()
    except BaseException as error:
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        pipe.send((reason, traceback.format_exc()))


def _run(step: Step, numbers: range) -> ContenderTurn:
    seconds, cpu_seconds, losses = [], [], []
    for number in numbers:
        start, cpu = time.perf_counter(), time.process_time()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    return ContenderTurn(seconds, cpu_seconds, losses, peak_memory(torch.device("cpu")) - _counted_twice())


def _counted_twice() -> int:
    """Bytes of shared memory in this process that the others count, where each counts its part: as the kernel has it,
    the proportional set size is that part."""
    rollup, status = Path("/proc/self/smaps_rollup"), Path("/proc/self/status")
    if not rollup.exists():
        return 0
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", rollup.read_text() + status.read_text(), re.MULTILINE))
    return 1024 * (int(kilobytes["RssShmem"]) - int(kilobytes["Pss_Shmem"]))
