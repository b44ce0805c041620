"""Contenders in processes of their own, which stay and wait while others run.

A contender keeps its processes for the whole race: what it compiled, its allocator's heap, its optimizer states.
Between its turns they are blocked on a pipe, so that they take no time from the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import peak_memory
from shoal.launch.worker_pool import Pool, RankError

Step = Callable[[int], float]

TIMEOUT = 300.0  # seconds for the first step, which may compile; collectives give up a little earlier
PATIENCE = 10.0  # times as long as its longest step so far may each further one take


class Failed(RuntimeError):
    """A contender could not be built, raised in a step, died or hung; the message has its traceback.

    Attributes:
        reason: the same in one line, without it.
    """

    def __init__(self, contender: str, error: RankError):
        rank, cause = error.failures[0]
        super().__init__(f"{contender}, rank {rank}: {cause}")
        self.reason = f"{contender}, rank {rank}: {error.reason}"


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
        self._pool = Pool(contender.ranks, partial(_set_up, contender), keep_group=True)

    def __enter__(self) -> ContenderProcesses:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

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
        timeout = TIMEOUT + PATIENCE * steps * self._longest
        numbers = range(self._done, self._done + steps)
        try:
            turns = self._pool.run(_turn, self.contender.ranks, self.contender, numbers, timeout=timeout)
        except RankError as error:
            raise Failed(self.contender.name, error) from None
        self._done += steps
        seconds = [max(ranks) for ranks in zip(*(turn.seconds for turn in turns), strict=True)]
        self._longest = max(self._longest, *seconds)
        return ContenderTurn(
            seconds,
            [sum(ranks) for ranks in zip(*(turn.cpu_seconds for turn in turns), strict=True)],
            [sum(ranks) for ranks in zip(*(turn.losses for turn in turns), strict=True)],
            max(turn.memory for turn in turns),
        )


# ---- in a process of a contender -------------------------------------------------------------------------------------


def _set_up(contender: Contender) -> None:
    torch.set_num_threads(contender.threads)
    if contender.tuned:
        tune_process(products=contender.products)


_built: list[Step] = []  # of this process's contender, after its first turn


def _turn(contender: Contender, numbers: range) -> ContenderTurn:
    if not _built:
        _built.append(contender.build(contender.workload, dist.get_rank(), contender.ranks))
    (step,) = _built
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
