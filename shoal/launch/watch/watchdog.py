"""Detect lost ranks whose processes still exist: stopped, silent, or stuck while the others wait.

The watchdog uses heartbeat records (`shoal.training.resilience.heartbeat`) and the kernel's process states. It counts
only the time in which it was watching: after a suspension of the supervisor or the machine, no rank counts as silent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.base.errors import redact
from shoal.engine.device import COLLECTIVE_SECONDS
from shoal.launch.rank_env import stack_path
from shoal.launch.watch.rank_failure import Failure
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.heartbeat import HeartbeatRecord, Phase

STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its stack (`faulthandler`)
STACK_SECONDS = 3.0  # timeout of the stack: a rank on a busy machine may have to wait for a core
STOPPED_SECONDS = 2.0
BUSY = 0.2  # of a core; threads that wait for the interpreter's lock use less
LONGEST_GAP = 1.0  # maximum time between two checks that counts
SLOW_SECONDS = 0.9 * COLLECTIVE_SECONDS  # before the collective's timeout, as the ranks waiting in it are not the cause
STEPS_ALLOWED = 3.0
WAITING = re.compile(r"shoal/engine/collectives/|torch/distributed/")  # files in the stack of a waiting rank


class Sign(NamedTuple):
    """Observation of one rank at one moment."""

    record: HeartbeatRecord | None
    state: str
    """Process state letter of the kernel, ``T`` if stopped; "" if unknown."""

    processor: float
    """CPU time used [s]."""


@dataclass(frozen=True)
class Trouble:
    """A rank that must be killed."""

    rank: int
    what: str
    """Description of the problem: ``is stopped``, ``is silent``, ``is stuck``."""

    since: float
    """When the rank was last well, on `time.monotonic` [s]."""


@dataclass
class _Watched:
    """Last observation of one rank, and the watched time since."""

    alive: float = -1.0
    processor: float = -1.0
    quiet: float = 0.0
    """Time since the last heartbeat [s]."""

    idle: float = 0.0
    """Time since the last heartbeat or CPU use [s]."""


class Watchdog:
    """Watchdog of one attempt.

    Args:
        limits: timeouts.
        ranks: number of ranks.
    """

    def __init__(self, limits: FailoverConfig, ranks: int):
        self.limits = limits
        self._watched = [_Watched() for _ in range(ranks)]
        self._looked: float | None = None
        self._counts: list[int] | None = None
        self._steps: int | None = None
        self._stalled = self._step = self.slowest = 0.0

    def look(self, signs: list[Sign], now: float, silent: Container[int] | None = None) -> Trouble | None:
        """Check all ranks at time ``now`` (`time.monotonic`). A stuck rank has number -1: only the stacks identify it.

        Args:
            silent: ranks to check for silence; None checks all.
        """
        gap = 0.0 if self._looked is None else min(now - self._looked, LONGEST_GAP)
        self._looked = now
        for rank, sign in enumerate(signs):
            if sign.record is None or (silent is not None and rank not in silent):
                continue
            if what := self._silence(self._watched[rank], sign, sign.record.alive, gap):
                return Trouble(rank, what, sign.record.alive)
        return self._stall([sign.record for sign in signs if sign.record is not None], gap)

    def _silence(self, watched: _Watched, sign: Sign, alive: float, gap: float) -> str:
        if alive != watched.alive:
            watched.alive, watched.processor, watched.quiet, watched.idle = alive, sign.processor, 0.0, 0.0
            return ""
        watched.quiet += gap
        watched.idle += gap
        used, watched.processor = sign.processor - watched.processor, sign.processor
        if sign.state == "R" or used > BUSY * gap:  # it works in code that blocks its other threads
            watched.idle = 0.0
        if sign.state in ("T", "t") and watched.quiet >= STOPPED_SECONDS:
            return "is stopped (SIGSTOP)"
        return "is silent" if watched.idle >= self.limits.heartbeat_timeout_seconds else ""

    def _stall(self, records: list[HeartbeatRecord], gap: float) -> Trouble | None:
        counts = [record.count for record in records]
        steps = max((record.steps for record in records), default=0)
        self._step += gap
        if steps != self._steps:
            if self._steps is not None:
                self.slowest = max(self.slowest, self._step)
            self._steps, self._step = steps, 0.0
        if counts != self._counts:
            self._counts, self._stalled = counts, 0.0
            return None
        self._stalled += gap
        if not records or self._stalled < self.limit(records):
            return None
        return Trouble(-1, "is stuck", max(record.marked for record in records))

    def limit(self, records: list[HeartbeatRecord]) -> float:
        """Return the allowed seconds without progress: short once all ranks are in steps and have completed one."""
        if all(record.phase is Phase.STEP and record.steps > record.begun >= 0 for record in records):
            return self.limits.progress_timeout_seconds + STEPS_ALLOWED * self.slowest
        return SLOW_SECONDS


# ---- processes of this machine ---------------------------------------------------------------------------------------


def process_state(pid: int) -> tuple[str, float]:
    """Return the kernel's state letter of a process and its CPU time [s]; ("", 0) without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_stack_when_asked(path: Path) -> None:
    """Make this process append the stacks of its threads to a file whenever it receives `STACK_SIGNAL`."""
    faulthandler.register(STACK_SIGNAL, open(path, "a"), all_threads=True)  # noqa: SIM115 -- for good


def collect_stacks(pids: dict[int, int], files: dict[int, Path], wake: bool = False) -> dict[int, str]:
    """Request stacks from ranks; "" for a rank that gives none in time.

    Args:
        pids: process id of each rank.
        files: stack file of each rank.
        wake: continue stopped processes so that they can answer; for ranks that are killed next.
    """
    before = {rank: _content(files[rank]) for rank in pids}
    for pid in pids.values():
        _kill(pid, STACK_SIGNAL)
        if wake:
            _kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_SECONDS
    last, now = None, before
    while time.monotonic() < deadline and not (now == last and all(now[rank] != before[rank] for rank in pids)):
        time.sleep(0.05)
        last, now = now, {rank: _content(files[rank]) for rank in pids}
    return {rank: text.removeprefix(before[rank]) for rank, text in now.items()}


def _content(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def locate_lost_rank(
    trouble: Trouble, records: dict[int, HeartbeatRecord], folder: Path, *, alone: bool = True
) -> Failure | None:
    """Identify the lost rank and collect its stack; None if it is on another host.

    Args:
        records: heartbeat records of all ranks here that still run.
        folder: folder of their stack files.
        alone: whether all ranks are on this host. If not, and all ranks here wait, the lost rank is on another host.
    """
    asked = records if trouble.rank < 0 else {trouble.rank: records[trouble.rank]}
    pids = {rank: record.pid for rank, record in asked.items()}
    found = collect_stacks(pids, {rank: stack_path(folder, rank) for rank in asked}, wake=trouble.rank >= 0)
    if trouble.rank < 0 and not alone and all(map(is_waiting, found.values())):
        return None
    rank = trouble.rank if trouble.rank >= 0 else find_stuck_rank(found, records)
    how = f"{trouble.what} since {time.monotonic() - trouble.since:.1f} s and was ended,"
    return Failure(rank, -signal.SIGKILL, trouble.since, redact(found[rank]), how, trouble.since, records[rank])


def find_stuck_rank(found: dict[int, str], records: dict[int, HeartbeatRecord]) -> int:
    """Return the stuck rank that the others wait for: one outside collectives, else the one with least progress."""
    busy = [rank for rank, stack in found.items() if stack and not is_waiting(stack)]
    return min(busy or found, key=lambda rank: (records[rank].steps, records[rank].count, rank))


def is_waiting(stack: str) -> bool:
    """Return whether a rank's main thread waits for other ranks, according to its `faulthandler` stack."""
    frames = stack.partition("Current thread")[2].splitlines()[1:7]
    return any(WAITING.search(line) for line in itertools.takewhile(lambda line: line.startswith("  "), frames))


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
