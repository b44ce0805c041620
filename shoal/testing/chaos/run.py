"""Trials of a run under faults, one after the other, or one long run in which ranks are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TextIO

from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.data.prepare import prepare
from shoal.launch.local_launcher import start_rank_server
from shoal.launch.prefork import PreforkServer
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.spec.config import RunConfig
from shoal.testing.chaos.chaos import Chaos, Trial, supervisor_of
from shoal.testing.chaos.fault_types import KINDS, NEED_MOUNTS
from shoal.testing.chaos.mounts import own_mounts
from shoal.testing.chaos.report import line, table
from shoal.training.check import check
from shoal.training.resilience.events import read_events


@dataclass(frozen=True)
class LongRun:
    """What one long run says of itself.

    Attributes:
        seconds: from its start to its end.
        killed: the number of ranks that were killed.
        effective: the share of the time that counted for training.
        lost: steps that were made again.
        recoveries: seconds from each failure to the next step.
    """

    seconds: float
    killed: int
    effective: float
    lost: int
    recoveries: tuple[float, ...]

    def describe(self) -> str:
        """The same in one line."""
        some = self.recoveries
        recovery = f"{mean(some):.1f} s to the next step, {max(some):.1f} s at most" if some else "none needed"
        return (
            f"{self.seconds:.0f} s; ranks killed: {self.killed}; effective training time {self.effective:.1%}; steps "
            f"made again: {self.lost}; recovery: {recovery}"
        )


@dataclass(frozen=True)
class ChaosResult:
    """What came of the faults.

    Attributes:
        folder: where the runs were made: it holds the log, and what failed trials left. None where it was removed,
            because all trials passed and no folder was named.
        trials: one for each fault; none of a long run.
        long_run: None of trials, and of a long run that did not come to its end.
    """

    folder: Path | None = None
    trials: tuple[Trial, ...] = ()
    long_run: LongRun | None = None

    @property
    def failed(self) -> int:
        """The number of trials that did not pass."""
        return sum(bool(trial.problems) for trial in self.trials)

    @property
    def passed(self) -> bool:
        """Whether something was tried, and all of it survived."""
        return bool(self.trials or self.long_run) and not self.failed


def chaos(
    config: RunConfig,
    *,
    trials: int = 50,
    faults: str = "all",
    seed: int = 0,
    folder: str | Path | None = None,
    minutes: float | None = None,
    every: float = 60.0,
    show: bool = False,
) -> ChaosResult:
    """Make a run again and again on this machine's CPU, each time with a fault, and check that it survives.

    A run survives if it ends with the state of an undisturbed one and leaves nothing behind. Meanwhile stdout and
    stderr of this process go into a log. A kind of fault that cannot be tried here is named on stderr.

    Args:
        config: of the run.
        trials: how many, the kinds of faults in turn.
        faults: which, with commas between, or "all".
        seed: of the moments at which they happen.
        folder: where the runs are made (default: a new one for temporary files).
        minutes: instead of trials, train once for so long, and kill a rank again and again.
        every: with ``minutes``, the seconds between two failures.
        show: print each trial, and a table of all.

    Raises:
        UsageError: there is no such fault, the run can have none of them, or the run cannot be.

    >>> import shoal
    >>> config = shoal.RunConfig.model_validate({
    ...     "model": {"name": "tiny", "layers": 1, "hidden": 32, "heads": 2},
    ...     "parallel": {"dp": 2},
    ...     "data": {"source": "synthetic", "sequence_length": 32},
    ...     "train": {"steps": 6, "global_batch": 2},
    ...     "checkpoint": {"every": 2},
    ... })
    >>> result = shoal.chaos(config, trials=1, faults="exit-0")
    >>> result.passed, result.trials[0].fault
    (True, 'exit-0')
    """
    chosen = list(KINDS) if faults == "all" else faults.split(",")
    for name in chosen:
        if name not in KINDS:
            raise UsageError(f"--faults {name}: there is none; {did_you_mean(name, KINDS)}")
    check(config)
    if config.train.device == "cuda":
        raise UsageError("train.device = cuda: trials are made on the CPU.\n  Leave it out.")
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": "cpu"})})
    if NEED_MOUNTS & set(chosen) and minutes is None and not own_mounts():
        chosen = [name for name in chosen if name not in NEED_MOUNTS]
        print(f"not tried, as no file system can be mounted here: {', '.join(sorted(NEED_MOUNTS))}", file=sys.stderr)
        if not chosen:
            return ChaosResult()
    place = Path(folder or tempfile.mkdtemp(prefix="shoal-chaos-"))
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = place / "said.log"
    with _captured(log, show) as console, start_rank_server(config.parallel.world_size, place, "cpu") as server:
        if minutes is not None:
            return ChaosResult(place, long_run=_endure(config, place, server, console, minutes, every, seed))
        runs = Chaos(config, place, server, log)
        kinds = [name for name in chosen if runs.can_have(name)]
        if not kinds:
            raise UsageError(f"--faults {faults}: this run can have none of them.")
        results: list[Trial] = []
        for number, name in zip(range(trials), cycle(kinds), strict=False):
            # The moments of a kind do not depend on which others there are.
            results.append(runs.trial(name, random.Random(f"{seed} {name} {number}"), number))
            console.print(line(number + 1, results[-1]))
        console.print(table(results))
    if folder is None and not any(trial.problems for trial in results):
        shutil.rmtree(place)
        return ChaosResult(None, tuple(results))
    return ChaosResult(place, tuple(results))


def _endure(
    config: RunConfig, folder: Path, server: PreforkServer, console: Console, minutes: float, every: float,
    seed: int,
) -> LongRun | None:
    """Train for some minutes while ranks are killed, stop, and read what the run reports of itself."""
    train = config.train.model_copy(update={"steps": 10**9})
    data = config.data.model_copy(update={"cache": folder / "cache"})
    config = config.model_copy(update={"train": train, "data": data})
    prepare(config.data)
    place = folder / f"run-{int(time.time())}"
    supervisor = supervisor_of(config, place, server)
    stop = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    try:
        with _failing(place, every, random.Random(seed)) as kills:
            supervisor.run()
    finally:
        stop.cancel()
    events = read_events(place)
    end = next((event for event in reversed(events) if event["event"] == "end"), None)
    if end is None:
        console.print("the run did not come to its end")
        return None
    recoveries = tuple(event["seconds"] for event in events if event["event"] == "recovered")
    found = LongRun(end["seconds"], len(kills), end["effective"], end["lost"], recoveries)
    console.print(found.describe())
    return found


@contextmanager
def _failing(folder: Path, every: float, rng: random.Random) -> Iterator[list[int]]:
    """Kill a rank of the run in a folder every so many seconds, as long as the context lasts. Yields the list of them.
    """
    stop, kills = threading.Event(), list[int]()

    def act() -> None:
        while not stop.wait(every):
            try:
                ranks = json.loads((folder / PROCESSES_FILE).read_text())["ranks"]
                pid = rng.choice(ranks)
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)
            except (OSError, ValueError, IndexError):
                continue  # between two attempts

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        stop.set()
        thread.join()


@contextmanager
def _captured(log: Path, show: bool) -> Iterator[Console]:
    """Write what this process and its children print into a file; gives a console where stdout was."""
    sys.stdout.flush()
    sys.stderr.flush()
    ends = [os.dup(1), os.dup(2)]
    with open(log, "a", buffering=1) as file, open(ends[0], "w", closefd=False) as terminal:
        console = Console(
            file=terminal if _is_fd_1(sys.stdout) else sys.stdout, highlight=False,
            width=None if terminal.isatty() else 160, quiet=not show,
        )
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stdout(file), redirect_stderr(file):  # they need not be 1 and 2, as in a notebook
                yield console
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, end in enumerate(ends, start=1):
                os.dup2(end, number)
                os.close(end)


def _is_fd_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError, ValueError):  # it is no file
        return False
