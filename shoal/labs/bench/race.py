"""Races: time variants of the same work on the same cores, and compare them.

Times on a shared machine drift by more than the differences of interest. So variants take turns, A B A B, and medians
over many turns are compared. `time_in_turns` times functions of one process, `run_race` trainings in worker processes.
A variant keeps its processes during a race, with their compiled code, heap and optimizer state.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from shoal.engine.device import peak_memory, synchronize, tune_process
from shoal.labs.bench.benchmark import Notify, Row
from shoal.labs.bench.step.workload import MatmulWorkload, Step, Workload
from shoal.launch.worker_pool import Pool, RankError

K = TypeVar("K")
CPU = torch.device("cpu")

COMPARED = 16
"""Number of steps whose losses are compared; training amplifies differences in rounding with every step."""

TIMEOUT = 300.0  # seconds for the first step, which may compile; collectives time out a little earlier
PATIENCE = 10.0  # maximum time of each further step, as a multiple of the longest step so far


class RaceError(RuntimeError):
    """A variant could not be built, failed or hung, which a note shows by its traceback or stack; or two variants
    computed different losses."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Attributes:
        build: function from (workload, rank, ranks) to a step; a top-level function or a `functools.partial` of one.
        threads: torch threads in each process.
        tuned: configure its processes like shoal's ranks (`shoal.engine.device`).
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
            RaceError: a rank failed, or the steps took far longer than earlier ones and count as hung.
        """
        timeout = TIMEOUT + PATIENCE * steps * self._longest
        numbers = range(self._done, self._done + steps)
        try:
            turns = self.run(_run_turn, self.variant.ranks, self.variant, numbers, timeout=timeout)
        except RankError as error:
            rank, details = error.failures[0]
            failure = RaceError(f"{self.variant.name}, rank {rank}: {error.reason}")
            failure.add_note(details)
            raise failure from None
        self._done += steps
        seconds = [max(ranks) for ranks in zip(*(turn.seconds for turn in turns), strict=True)]
        self._longest = max(self._longest, *seconds)
        return VariantTurn(
            seconds,
            [sum(ranks) for ranks in zip(*(turn.cpu_seconds for turn in turns), strict=True)],
            [sum(ranks) for ranks in zip(*(turn.losses for turn in turns), strict=True)],
            max(turn.memory for turn in turns),
        )


@dataclass(frozen=True)
class Race:
    """Variants to compare.

    Attributes:
        references: torch's variants; the fastest of them counts.
        target: speed that ours must reach, as a multiple of the reference's (or as a share of a peak).
        also: variants that are shown only.
        bounds: variants that omit part of the work, and so compute other losses: limits of what ours can reach.
        tolerance: allowed relative difference of losses by rounding; None if losses are not comparable.
        fastest: only the fastest of ours has to reach the target, instead of each.
    """

    name: str
    ours: tuple[Variant, ...]
    references: tuple[Variant, ...]
    target: float
    also: tuple[Variant, ...] = ()
    bounds: tuple[Variant, ...] = ()
    tolerance: float | None = 1e-3
    fastest: bool = False

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (*self.ours, *self.references, *self.also, *self.bounds)


@dataclass
class VariantResult:
    """All turns of one variant."""

    variant: Variant
    turns: list[VariantTurn] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(second for turn in self.turns for second in turn.seconds)

    @property
    def losses(self) -> list[float]:
        return [loss for turn in self.turns for loss in turn.losses]

    def rate(self, turn: int | None = None) -> float:
        """Return FLOP/s, in one turn or overall."""
        seconds = self.median if turn is None else median(self.turns[turn].seconds)
        return self.variant.workload.flops / seconds


def time_in_turns(
    variants: Mapping[K, Callable[[], object]], turns: int, *, warmup: int = 1,
    prepare: Callable[[K], object] = lambda name: None, in_a_row: int = 1, device: torch.device = CPU,
) -> dict[K, list[float]]:
    """Time functions of this process in the order A B C A B C; return the seconds of one call in every turn.

    Args:
        warmup: untimed turns before.
        prepare: called with a function's name before its time starts, for example a barrier.
        in_a_row: calls in a turn.
        device: wait for the work queued on it.
    """
    seconds: dict[K, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + turns):
        for name, call in variants.items():
            prepare(name)
            synchronize(device)
            start = time.perf_counter()
            for _ in range(in_a_row):
                call()
            synchronize(device)
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - start) / in_a_row)
    return seconds


def slowest_rank(ranks: Sequence[Mapping[K, Sequence[float]]]) -> dict[K, list[float]]:
    """Return the seconds of every turn on the rank that took longest in it."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def run_race(race: Race, turns: int, steps: int, warmup: int, notify: Notify) -> list[Row]:
    """Run a race with the arguments and errors of `take_turns` and `check_agreement`; return its `summarise`."""
    results = take_turns(race.variants, turns, steps, warmup, lambda what: notify(f"{race.name}: {what}"))
    if race.tolerance is not None:
        check_agreement([result for result in results if result.variant not in race.bounds], race.tolerance)
    return summarise(race, results)


def take_turns(
    variants: Sequence[Variant], turns: int, steps: int, warmup: int, notify: Notify
) -> list[VariantResult]:
    """Train variants in turns of some steps, each in its own processes, after at least one untimed step of warm-up."""
    results = [VariantResult(variant) for variant in variants]
    with ExitStack() as stack:
        notify(f"starting {len(results)} variants")
        processes = [VariantProcesses(variant) for variant in variants]
        for process in processes:
            stack.enter_context(process)
            process.step(1)  # shows how long further steps may take
            if warmup > 1:
                process.step(warmup - 1)
        for turn in range(turns):
            notify(f"turn {turn + 1} of {turns}")
            for process, result in zip(processes, results, strict=True):
                result.turns.append(process.step(steps))
    return results


def check_agreement(results: Sequence[VariantResult], tolerance: float) -> None:
    """Reject variants whose losses differ in one of their first `COMPARED` timed steps.

    Raises:
        RaceError: naming the step and both losses.
    """
    first, *others = results
    for other in others:
        for step, (ours, theirs) in enumerate(zip(first.losses[:COMPARED], other.losses[:COMPARED], strict=True)):
            if not math.isclose(ours, theirs, rel_tol=tolerance):
                raise RaceError(
                    f"timed step {step}: {first.variant.name} has the loss {ours:.6f}, "
                    f"{other.variant.name} {theirs:.6f}: they do not do the same work"
                )


def summarise(race: Race, results: Sequence[VariantResult]) -> list[Row]:
    """Compare every variant with the fastest reference.

    Returns:
        For each variant the median seconds of a step, as wall time and as CPU time of all threads and ranks; the ratio
        of its speed to the best reference's (for a share of the peak, of FLOP/s), with the quartiles over the turns
        ("spread_low", "spread_high"); the target of the ratio, None for a variant without one; and the peak bytes of
        its largest process.
    """
    best = min((result for result in results if result.variant in race.references), key=lambda result: result.median)
    judged = [result for result in results if result.variant in race.ours]
    if race.fastest:
        judged = [min(judged, key=lambda result: result.median)]
    rows: list[Row] = []
    for result in results:
        ratio, target = result.rate() / best.rate(), race.target if result in judged else None
        low, high = quartiles([result.rate(turn) / best.rate(turn) for turn in range(len(result.turns))])
        rows.append({
            "race": race.name, "variant": result.variant.name, "seconds": result.median,
            "cpu_seconds": median(second for turn in result.turns for second in turn.cpu_seconds),
            "tokens_per_second": result.variant.workload.tokens / result.median, "ratio": ratio, "spread_low": low,
            "spread_high": high, "target": target, "memory": max(turn.memory for turn in result.turns),
            "met": None if target is None else ratio >= target,
        })
    return rows


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    low, high = np.quantile(values, (0.25, 0.75)).tolist()
    return low, high


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
    return VariantTurn(seconds, cpu_seconds, losses, peak_memory(CPU) - _count_peers_memory())


def _count_peers_memory() -> int:
    """Return the bytes of this process's shared memory beyond its part, which is Linux's proportional set size."""
    rollup, status = Path("/proc/self/smaps_rollup"), Path("/proc/self/status")
    if not rollup.exists():
        return 0
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", rollup.read_text() + status.read_text(), re.MULTILINE))
    return 1024 * (int(kilobytes["RssShmem"]) - int(kilobytes["Pss_Shmem"]))
