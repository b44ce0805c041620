"""`shoal chaos`: trials of a run under faults, or one long run in which ranks are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean, from_os_error
from shoal.base.files import read_json, write_atomically
from shoal.engine.data.prepare import prepare
from shoal.launch.local_launcher import start_rank_server
from shoal.launch.prefork import PreforkServer
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.report.page import page
from shoal.report.tables import html_table, text_table
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import UNSYNCHRONISED
from shoal.testing.chaos.chaos import Chaos, Trial, beside, create_supervisor
from shoal.testing.chaos.fault_types import KINDS, NEED_MOUNTS
from shoal.testing.chaos.mounts import own_mounts
from shoal.training.check import check
from shoal.training.resilience.events import read_events

COLUMNS = (
    "fault", "tried", "survived", "lost, mean", "most", "in process", "seconds, least", "median", "99 %", "most",
)


@dataclass(frozen=True)
class LongRun:
    """Outcome of one long run, from its own events."""

    seconds: float
    killed: int  # number of killed ranks
    effective: float  # fraction of the time that counted for training
    lost: int  # repeated steps
    recoveries: tuple[float, ...]  # from each failure to the next step [s]

    def __str__(self) -> str:
        times = self.recoveries
        recovery = f"{mean(times):.1f} s to the next step, {max(times):.1f} s at most" if times else "not needed"
        return (
            f"{self.seconds:.0f} s; ranks killed: {self.killed}; effective training time {self.effective:.1%}; steps "
            f"repeated: {self.lost}; recovery: {recovery}"
        )


@dataclass(frozen=True)
class ChaosResult:
    """Outcome of the faults.

    Attributes:
        folder: folder with the log and the files of failed trials. None if it was removed, because all trials passed
            and no folder was given.
        trials: one for each fault; none for a long run.
        long_run: None for trials, and for a long run that did not end properly.
    """

    folder: Path | None = None
    trials: tuple[Trial, ...] = ()
    long_run: LongRun | None = None

    @property
    def failed(self) -> int:
        return sum(bool(trial.problems) for trial in self.trials)

    @property
    def passed(self) -> bool:
        """Whether something was tried and nothing failed."""
        return bool(self.trials or self.long_run) and not self.failed


def chaos(
    config: RunConfig,
    *,
    trials: PositiveInt = 50,
    faults: str = "all",
    seed: int = 0,
    folder: str | Path | None = None,
    minutes: float | None = None,
    every: float = 60.0,
    show: bool = False,
) -> ChaosResult:
    """Repeat a run on this machine's CPU, each time with a fault, and check that it survives.

    A run survives if it ends with the state of an undisturbed run and no remains. During the trials, stdout and stderr
    of this process are written to a log. Faults that cannot be tried here are listed on stderr.

    Args:
        trials: number of trials; they cycle through the faults.
        faults: comma-separated faults, or "all".
        seed: of the times of the faults.
        folder: of the runs (default: a new temporary one).
        minutes: instead of trials, train once for this long and repeatedly kill a rank.
        every: with ``minutes``, seconds between two failures.
        show: print each trial and a table.

    Raises:
        UsageError: an unknown fault, no fault that is possible in this run, or an impossible run.

    >>> import shoal
    >>> config = shoal.RunConfig(
    ...     model={"name": "tiny", "layers": 1, "hidden": 32, "heads": 2},
    ...     parallel={"dp": 2},
    ...     data={"source": "synthetic", "sequence_length": 32},
    ...     train={"steps": 6, "global_batch": 2},
    ...     checkpoint={"every": 2},
    ... )
    >>> result = shoal.chaos(config, trials=1, faults="exit-0")
    >>> result.passed, result.trials[0].fault
    (True, 'exit-0')
    """
    chosen = list(KINDS) if faults == "all" else faults.split(",")
    for name in chosen:
        if name not in KINDS:
            raise UsageError(f"--faults {name}: no such fault; {did_you_mean(name, KINDS)}")
    check(config)
    sync = config.parallel.sync
    if minutes is None and sync in UNSYNCHRONISED and sync != "ps-bsp":
        raise UsageError(
            f"parallel.sync = {sync!r}: a stop or a lost rank changes what its replicas exchange; trials compare bits."
            "\n  Use another, or one long run: --minutes."
        )
    if config.train.device == "cuda":
        raise UsageError("train.device = cuda: trials run on the CPU.\n  Leave it out.")
    config = config.replace(train={"device": "cpu"})
    if NEED_MOUNTS & set(chosen) and minutes is None and not own_mounts():
        chosen = [name for name in chosen if name not in NEED_MOUNTS]
        print(f"not tried, no permission to mount file systems: {', '.join(sorted(NEED_MOUNTS))}", file=sys.stderr)
        if not chosen:
            return ChaosResult()
    place = Path(folder or tempfile.mkdtemp(prefix="shoal-chaos-"))
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error) from None
    log = place / "output.log"
    with _captured(log, show) as console, start_rank_server(config, "cpu") as server:
        if minutes is not None:
            return ChaosResult(place, long_run=_endure(config, place, server, console, minutes, every, seed))
        runs = Chaos(config, place, server, log)
        kinds = [name for name in chosen if runs.can_have(name)]
        if not kinds:
            raise UsageError(f"--faults {faults}: not possible in this run.\n  Add others, or use more ranks.")
        results: list[Trial] = []
        for number, name in zip(range(trials), cycle(kinds), strict=False):
            # The moments of a fault do not depend on the other faults.
            results.append(runs.trial(name, random.Random(f"{seed} {name} {number}"), number))
            console.print(describe_trial(number + 1, results[-1]))
        console.print(text_table(COLUMNS, count_by_fault(results), lines=True))
    if folder is None and not any(trial.problems for trial in results):
        shutil.rmtree(place)
        return ChaosResult(None, tuple(results))
    return ChaosResult(place, tuple(results))


def _endure(
    config: RunConfig, folder: Path, server: PreforkServer, console: Console, minutes: float, every: float,
    seed: int,
) -> LongRun | None:
    """Train for some minutes while ranks are killed, stop, and read the run's events."""
    config = config.replace(train={"steps": 10**9}, data={"cache": folder / "cache"})
    prepare(config.data)
    place = folder / f"run-{int(time.time())}"
    supervisor = create_supervisor(config, place, server)
    stop = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    rng, kills = random.Random(seed), list[int]()

    def kill_ranks(ended: threading.Event) -> None:
        while not ended.wait(every):
            with suppress(UsageError, OSError, LookupError, TypeError):  # between two attempts
                pid = rng.choice(read_json(place / PROCESSES_FILE)["ranks"])
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)

    stop.start()
    try:
        with beside(kill_ranks):
            supervisor.run()
    finally:
        stop.cancel()
    events = read_events(place)
    end = next((event for event in reversed(events) if event["event"] == "end"), None)
    if end is None:
        console.print("the run did not end properly")
        return None
    recoveries = tuple(event["seconds"] for event in events if event["event"] == "recovered")
    found = LongRun(end["seconds"], len(kills), end["effective"], end["lost"], recoveries)
    console.print(str(found))
    return found


@contextmanager
def _captured(log: Path, show: bool) -> Iterator[Console]:
    """Redirect the output of this process and its children to a file; yields a console on the original stdout."""
    sys.stdout.flush()
    sys.stderr.flush()
    ends = [os.dup(1), os.dup(2)]
    try:
        to_terminal = sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # not a file
        to_terminal = False
    with open(log, "a", buffering=1) as file, open(ends[0], "w", closefd=False) as terminal:
        console = Console(
            file=terminal if to_terminal else sys.stdout, highlight=False,
            width=None if terminal.isatty() else 160, quiet=not show,
        )
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stdout(file), redirect_stderr(file):  # may differ from 1 and 2, as in a notebook
                yield console
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, end in enumerate(ends, start=1):
                os.dup2(end, number)
                os.close(end)


# ---- report ----------------------------------------------------------------------------------------------------------


def count_by_fault(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return a row for each kind of fault, and one for all."""
    rows: list[tuple[str, ...]] = []
    names = [name for name in KINDS if any(trial.fault == name for trial in trials)]
    for name in [*names, "all"]:
        mine = [trial for trial in trials if name in (trial.fault, "all")]
        lost = [steps for trial in mine for steps in trial.lost]
        seconds = sorted(each for trial in mine for each in trial.seconds)
        rows.append((
            name, str(len(mine)), str(sum(not trial.problems for trial in mine)),
            f"{mean(lost):.1f}" if lost else "-", str(max(lost)) if lost else "-",
            f"{sum(trial.in_process for trial in mine)} of {len(seconds)}" if seconds else "-",
            *(f"{seconds[round(share * (len(seconds) - 1))]:.1f}" if seconds else "-" for share in (0, 0.5, 0.99, 1)),
        ))
    return rows


def describe_trial(number: int, trial: Trial) -> str:
    outcome = "; ".join(trial.problems) or "passed"
    lost = ", ".join(f"{steps:g}" for steps in trial.lost) or "-"
    seconds = ", ".join(f"{each:g}" for each in trial.seconds) or "-"
    return f"{number:4} {trial.fault:<21}{trial.moment:<30} {lost:>5} lost {seconds:>6} s  {outcome}"


def write_page(path: Path, config: RunConfig, trials: Sequence[Trial]) -> None:
    passed = sum(not trial.problems for trial in trials)
    lead = (
        f"{passed} of {len(trials)} faults survived by {config.model.name} on {config.parallel.describe()}: the run "
        "ended with the state of the undisturbed one, with no remains."
    )
    each = [(trial.fault, trial.moment, "; ".join(trial.problems) or "passed") for trial in trials]
    parts = [html_table(count_by_fault(trials), COLUMNS), "<h2>Every trial</h2>", html_table(each)]
    write_atomically(path, page("Faults", lead, parts))
