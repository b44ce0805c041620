"""Variants in worker processes of their own.

A variant keeps its processes during a race, with its compiled code, heap and optimizer state. Between its turns they
block on a pipe and take no time from other variants.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import peak_memory
from shoal.labs.bench.step.workload import MatmulWorkload, Workload
from shoal.launch.worker_pool import Pool, RankError

Step = Callable[[int], float]
"""Function of the step's number that returns this rank's share of its mean loss [nats]; the ranks' shares add up."""

TIMEOUT = 300.0  # seconds for the first step, which may compile; collectives time out a little earlier
PATIENCE = 10.0  # maximum time of each further step, as a multiple of the longest step so far


class Failed(RuntimeError):
    """A variant could not be built, raised in a step, died or hung; the message has its traceback.

    Attributes:
        reason: the message in one line, without the traceback.
    """

    def __init__(self, variant: str, error: RankError):
        rank, cause = error.failures[0]
        super().__init__(f"{variant}, rank {rank}: {cause}")
        self.reason = f"{variant}, rank {rank}: {error.reason}"


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Attributes:
        name: name in the table.
        build: function from (workload, rank, ranks) to a step; a top-level function or a `functools.partial` of one.
        workload: what it processes.
        ranks: processes.
        threads: torch threads in each process.
        tuned: configure its processes like shoal's ranks (`shoal.engine.cpu_tuning`).
        products: if tuned, also set the library of matrix products, not only the allocator.
    """

    name: str
    build: Callable[..., Step]
    workload: Workload | MatmulWorkload
    ranks: int = 1
    threads: int = 1
    tuned: bool = True
    products: bool = True


@dataclass(frozen=True)
class VariantTurn:
    """Some consecutive steps of one variant.

    Attributes:
        seconds: time of each step on the slowest rank.
        cpu_seconds: CPU time of each step over all threads and ranks, which other load hardly changes.
        losses: mean loss of each step [nats].
        memory: peak bytes of the largest process since it started; memory that n ranks share counts 1/n.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    memory: int = 0


class VariantProcesses(Pool):
    """The worker processes of one variant."""

    def __init__(self, variant: Variant):
        super().__init__(variant.ranks, partial(_set_up, variant), keep_group=True)
        self.variant = variant
        self._done = 0
        self._longest = 0.0  # seconds of a step so far

    def step(self, steps: int) -> VariantTurn:
        """Run the next ``steps`` steps.

        Raises:
            Failed: a rank failed, or the steps took so much longer than earlier ones that it must hang.
        """
        timeout = TIMEOUT + PATIENCE * steps * self._longest
        numbers = range(self._done, self._done + steps)
        try:
            turns = self.run(_run_turn, self.variant.ranks, self.variant, numbers, timeout=timeout)
        except RankError as error:
            raise Failed(self.variant.name, error) from None
        self._done += steps
        seconds = [max(ranks) for ranks in zip(*(turn.seconds for turn in turns), strict=True)]
        self._longest = max(self._longest, *seconds)
        return VariantTurn(
            seconds,
            [sum(ranks) for ranks in zip(*(turn.cpu_seconds for turn in turns), strict=True)],
            [sum(ranks) for ranks in zip(*(turn.losses for turn in turns), strict=True)],
            max(turn.memory for turn in turns),
        )


# ---- in a process of a variant ---------------------------------------------------------------------------------------


def _set_up(variant: Variant) -> None:
    torch.set_num_threads(variant.threads)
    if variant.tuned:
        tune_process(products=variant.products)


_built: list[Step] = []  # step of this process's variant, after its first turn


def _run_turn(variant: Variant, numbers: range) -> VariantTurn:
    if not _built:
        _built.append(variant.build(variant.workload, dist.get_rank(), variant.ranks))
    (step,) = _built
    seconds, cpu_seconds, losses = [], [], []
    for number in numbers:
        start, cpu = time.perf_counter(), time.process_time()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    return VariantTurn(seconds, cpu_seconds, losses, peak_memory(torch.device("cpu")) - _memory_of_peers())


def _memory_of_peers() -> int:
    """Return the bytes of shared memory in this process that count for other processes. Each one counts its part,
    which Linux reports as the proportional set size."""
    rollup, status = Path("/proc/self/smaps_rollup"), Path("/proc/self/status")
    if not rollup.exists():
        return 0
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", rollup.read_text() + status.read_text(), re.MULTILINE))
    return 1024 * (int(kilobytes["RssShmem"]) - int(kilobytes["Pss_Shmem"]))
