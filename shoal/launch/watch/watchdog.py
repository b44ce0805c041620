"""Which rank is lost though its process is there: stopped, silent, or stuck while the others wait for it.

The judge sees records (`shoal.training.resilience.heartbeat`) and what the kernel says of the processes. It counts the
time that it watched itself: a supervisor that was suspended, or a whole machine, finds nobody silent when it wakes.
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

STACK_SIGNAL = signal.SIGUSR2  # at which a rank writes its stack (`faulthandler`)
STACK_SECONDS = 3.0  # for which the stack is waited for: a rank on a busy machine may have to wait for a core
STOPPED_SECONDS = 2.0
BUSY = 0.2  # of a core: less is used by threads that wait for the interpreter's lock and look for it now and then
LONGEST_GAP = 1.0  # between two looks; of a longer one, so much is counted
SLOW_SECONDS = 0.9 * COLLECTIVE_SECONDS  # before a collective gives up: who waits in it is not the cause
STEPS_ALLOWED = 3.0
WAITING = re.compile(r"shoal/engine/collectives/|torch/distributed/")  # files in the stack of a rank that waits


class Sign(NamedTuple):
    """What is known of one rank at one moment."""

    record: HeartbeatRecord | None
    state: str
    """The kernel's letter of the process's state, ``T`` where it was stopped; "" where unknown."""

    processor: float
    """Seconds of a processor that it used."""


@dataclass(frozen=True)
class Trouble:
    """A rank that must be ended."""

    rank: int
    what: str
    """Of the rank: ``is stopped``, ``is silent``, ``is stuck``."""

    since: float
    """When it was last well, by `time.monotonic` [s]."""


@dataclass
class _Watched:
    """One rank's last news, and the seconds watched since."""

    alive: float = -1.0
    processor: float = -1.0
    quiet: float = 0.0
    """Since its last sign of life."""

    idle: float = 0.0
    """Since then or since it last worked."""


class Watchdog:
    """The judge of one attempt.

    Args:
        limits: how long is too long.
        ranks: how many there are.
    """

    def __init__(self, limits: FailoverConfig, ranks: int):
        self.limits = limits
        self._watched = [_Watched() for _ in range(ranks)]
        self._looked: float | None = None
        self._counts: list[int] | None = None
        self._steps: int | None = None
        self._stalled = self._step = self.slowest = 0.0

    def look(self, signs: list[Sign], now: float, silent: Container[int] | None = None) -> Trouble | None:
        """Judge, at a moment of `time.monotonic`. A stuck rank's number is -1: only the stacks tell who it is.

        Args:
            silent: of which ranks silence is a trouble; None for all.
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
        if sign.state == "R" or used > BUSY * gap:  # it works, in code that lets no other thread of it run
            watched.idle = 0.0
        if sign.state in ("T", "t") and watched.quiet >= STOPPED_SECONDS:
            return "is stopped (SIGSTOP)"
        return "is silent" if watched.idle >= self.limits.silence_seconds else ""

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
        """Seconds for which nobody needs to get on: little while all are in steps of which they have done one."""
        if all(record.phase is Phase.STEP and record.steps > record.begun >= 0 for record in records):
            return self.limits.stall_seconds + STEPS_ALLOWED * self.slowest
        return SLOW_SECONDS


# ---- processes of this machine ---------------------------------------------------------------------------------------


def process_state(pid: int) -> tuple[str, float]:
    """The kernel's letter of a process's state, and the seconds of a processor it used; ("", 0) without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_stack_when_asked(path: Path) -> None:
    """Have this process add the stacks of its threads to a file whenever it gets `STACK_SIGNAL`."""
    faulthandler.register(STACK_SIGNAL, open(path, "a"), all_threads=True)  # noqa: SIM115 -- for good


def collect_stacks(pids: dict[int, int], files: dict[int, Path], wake: bool = False) -> dict[int, str]:
    """Ask ranks for their stacks; "" of one that gives none in time.

    Args:
        pids: the process of each rank that is asked.
        files: where each writes.
        wake: let stopped processes run, so that they can answer: for those that are ended next.
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
    """The rank that is in trouble, with its stack.

    Args:
        records: of all ranks here that still run.
        folder: where they write their stacks.
        alone: there are none on other hosts; else, where all here wait for others, it is none of these.
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
    """Of ranks of which none gets on, the one that the others wait for: it is not itself in a collective; where all
    are, the one that has come least far."""
    busy = [rank for rank, stack in found.items() if stack and not is_waiting(stack)]
    return min(busy or found, key=lambda rank: (records[rank].steps, records[rank].count, rank))


def is_waiting(stack: str) -> bool:
    """Whether a rank's main thread, which took the signal, waits for others, by what `faulthandler` wrote."""
    frames = stack.partition("Current thread")[2].splitlines()[1:7]
    return any(WAITING.search(line) for line in itertools.takewhile(lambda line: line.startswith("  "), frames))


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
