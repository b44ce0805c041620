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
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shoal.base.errors import redact
from shoal.base.files import make_folder, open_to_append, read_tail, write_atomically
from shoal.base.polling import wait_until
from shoal.engine.device import COLLECTIVE_SECONDS
from shoal.launch.rank_env import stack_path
from shoal.launch.watch.rank_failure import Failure
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.heartbeat import ASKED, HeartbeatRecord, Phase, record_path, trace_path

STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its stack (`faulthandler`)
MOST_STACKS = 16 << 20  # bytes read of a file of stacks
TRACE_SECONDS = 1.0  # timeout of the traces, which a thread of the rank writes
STILL = 4  # looks without a change, after which a stack is complete: its writer may lose its core meanwhile
STACK_SECONDS = 3.0  # timeout of the stack: a rank on a busy machine may have to wait for a core
STOPPED_SECONDS = 2.0
START_SECONDS = 60.0  # from the start of a process to its first heartbeat, without CPU use
BUSY = 0.2  # of a core; threads that wait for the interpreter's lock use less
LONGEST_GAP = 1.0  # maximum time between two checks that counts
SLOW_SECONDS = 0.9 * COLLECTIVE_SECONDS  # before the collective's timeout, as the ranks waiting in it are not the cause
STEPS_ALLOWED = 3.0
WAITING = re.compile(r"shoal/engine/collectives/|torch/distributed/")  # files in the stack of a waiting rank


class Sign(NamedTuple):
    """Observation of one rank at one moment."""

    record: HeartbeatRecord | None  # None before the first heartbeat, and for a process that has ended
    state: str  # the kernel's letter, ``T`` if stopped; "" if unknown, and for a process that has ended
    processor: float  # CPU time used [s]


@dataclass
class _Watched:
    """Last observation of one rank, and the watched time since."""

    alive: float = -1.0
    processor: float = -1.0
    quiet: float = 0.0  # since the last heartbeat [s]
    idle: float = 0.0  # since the last heartbeat or CPU use [s]


class Watchdog:
    def __init__(self, limits: FailoverConfig):
        self.limits = limits
        self._watched: defaultdict[int, _Watched] = defaultdict(_Watched)
        self._looked: float | None = None
        self._counts: list[int] | None = None
        self._steps: int | None = None
        self._stalled = self._step = self.slowest = 0.0

    def look(self, signs: Mapping[int, Sign], now: float, silent: Container[int] | None = None) -> Failure | None:
        """Check all ranks at time ``now`` (`time.monotonic`); return a rank that must be killed.

        A stuck rank has number -1: only the stacks identify it.

        Args:
            silent: ranks to check for silence; None checks all.
        """
        gap = 0.0 if self._looked is None else min(now - self._looked, LONGEST_GAP)
        self._looked = now
        for rank, sign in signs.items():
            ended = sign.record is None and sign.state in ("", "Z")
            if ended or (silent is not None and rank not in silent):
                continue
            if what := self._silence(self._watched[rank], sign, gap):
                since = sign.record.alive if sign.record else now - self._watched[rank].quiet
                return Failure(rank, -signal.SIGKILL, since, trouble=what)
        return self._stall([sign.record for sign in signs.values() if sign.record is not None], gap)

    def _silence(self, watched: _Watched, sign: Sign, gap: float) -> str:
        alive = sign.record.alive if sign.record else 0.0
        limit = self.limits.heartbeat_timeout_seconds if sign.record else START_SECONDS
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
        return "is silent" if watched.idle >= limit else ""

    def _stall(self, records: list[HeartbeatRecord], gap: float) -> Failure | None:
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
        return Failure(-1, -signal.SIGKILL, max(record.marked for record in records), trouble="is stuck")

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
    faulthandler.register(STACK_SIGNAL, open_to_append(path), all_threads=True)  # for good


def collect_stacks(pids: dict[int, int], files: dict[int, Path], wake: bool = False) -> dict[int, str]:
    """Request the stacks of ranks by process id and stack file; "" for a rank that gives none in time.

    Args:
        wake: continue stopped processes so that they can answer; for ranks that are killed next.
    """
    before = {rank: read_tail(files[rank], MOST_STACKS) for rank in pids}
    for pid in pids.values():
        _kill(pid, STACK_SIGNAL)
        if wake:
            _kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_SECONDS
    still, now = 0, before
    while time.monotonic() < deadline and still < STILL:
        time.sleep(0.05)
        last, now = now, {rank: read_tail(files[rank], MOST_STACKS) for rank in pids}
        still = still + 1 if now == last and all(now[rank] != before[rank] for rank in pids) else 0
    return {rank: text.removeprefix(before[rank]) for rank, text in now.items()}


def collect_traces(ranks: Iterable[int], folder: Path, logs: Path) -> None:
    """Request traces of the newest collectives of ranks, and move them to the run's logs."""
    written = {rank: trace_path(record_path(folder, rank)) for rank in ranks}
    asked = folder / ASKED
    with contextlib.suppress(OSError):  # a full disk: the failure is reported without traces
        for path in written.values():
            path.unlink(missing_ok=True)  # of an answer that came too late before
        asked.touch()
        wait_until(lambda: all(path.exists() for path in written.values()), TRACE_SECONDS, 0.05)
    with contextlib.suppress(OSError):
        asked.unlink(missing_ok=True)
    for rank, path in written.items():
        with contextlib.suppress(OSError):  # the rank has not answered, or the disk is full
            if trace := path.read_bytes():
                make_folder(logs)
                write_atomically(logs / f"collectives-{rank}.json", trace)
            path.unlink()


def locate_lost_rank(
    lost: Failure, records: dict[int, HeartbeatRecord], folder: Path, logs: Path, *, alone: bool = True
) -> Failure | None:
    """Add the stack, and the number of a stuck rank, to what `Watchdog.look` found; None if it is on another host.

    Args:
        records: heartbeat records of all ranks here that still run.
        logs: folder of the run for traces of the collectives of a stuck run.
        alone: whether all ranks are on this host. If not, and all ranks here wait, the lost rank is on another host.
    """
    stuck = lost.rank < 0
    seconds = time.monotonic() - lost.when
    if not stuck and lost.rank not in records:
        return replace(lost, trouble=f"{lost.trouble} since {seconds:.1f} s and was ended before its first heartbeat")
    pids = {rank: record.pid for rank, record in records.items() if stuck or rank == lost.rank}
    found = collect_stacks(pids, {rank: stack_path(folder, rank) for rank in pids}, wake=not stuck)
    if stuck and not alone and all(map(is_waiting, found.values())):
        return None
    rank = find_stuck_rank(found, records) if stuck else lost.rank
    how = f"{lost.trouble} since {time.monotonic() - lost.when:.1f} s and was ended,"
    if stuck:
        collect_traces(records, folder, logs)
    return replace(lost, rank=rank, report=redact(found[rank]), trouble=how, record=records[rank])


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
