"""`shoal chaos`: the run survives whatever is done to it, or a table says what it does not survive."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from statistics import mean

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section, plain
from shoal.engine.data.prepare import prepare
from shoal.launch.local_launcher import start_nursery
from shoal.launch.supervisor import Supervisor
from shoal.report.page import Fragment, page
from shoal.report.timeline.write import check_name
from shoal.spec.config import RunConfig
from shoal.testing.chaos.chaos import Chaos, Trial, failing
from shoal.testing.chaos.fault_types import KINDS, NEED_MOUNTS
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from shoal.training.run_folder import new_run

OWN_MOUNTS = "SHOAL_CHAOS_MOUNTS"  # in the environment of a chaos that has file systems of its own
COLUMNS = ("fault", "tried", "survived", "steps lost, mean", "most", "seconds to recover, mean", "most")


class ChaosOptions(Section):
    trials: PositiveInt = 50
    """How many, the faults in turn."""

    faults: str = "all"
    """Which, with commas between; a wrong name lists them."""

    seed: NonNegativeInt = 0
    """Of the moments."""

    folder: Path | None = None
    """Where the trials are made, and what failed is kept (default: a folder of its own under /tmp)."""

    minutes: PositiveFloat | None = None
    """Instead of trials: one run of so long, in which a rank is killed every --every seconds."""

    every: PositiveFloat = 60.0
    """With --minutes: seconds between two failures."""

    out: Path | None = None
    """Write a page (.html)."""


def run(options: ChaosOptions, config: RunConfig) -> int:
    """Make the trials and show what came of them; returns 0 if all passed, else 1.

    Raises:
        UsageError: a fault that there is not, or a run that cannot be.
    """
    chosen = list(KINDS) if options.faults == "all" else options.faults.split(",")
    for name in chosen:
        if name not in KINDS:
            raise UsageError(f"--faults {name}: there is none; {did_you_mean(name, KINDS)}")
    if options.out:
        check_name(options.out)
        if options.out.suffix != ".html":
            raise UsageError(f"--out {options.out}: a page ends in .html")
    check(config)
    if config.train.device == "cuda":
        raise UsageError("train.device = cuda: trials are made on the CPU.\n  Leave it out.")
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": "cpu"})})
    if NEED_MOUNTS & set(chosen) and options.minutes is None and not own_mounts():
        chosen = [name for name in chosen if name not in NEED_MOUNTS]
        print(f"not tried, as no file system can be mounted here: {', '.join(sorted(NEED_MOUNTS))}", file=sys.stderr)
        if not chosen:
            return 1
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / "said.log"
    with captured(log) as console, start_nursery(config.parallel.world_size, folder, "cpu") as nursery:
        if options.minutes is not None:
            return endure(options, config, folder, nursery, console)
        chaos = Chaos(config, folder, nursery, log)
        trials = []
        for trial in every_trial(chaos, chosen, options):
            trials.append(trial)
            said = "; ".join(trial.problems) or "passed"
            lost, seconds = (", ".join(f"{n:g}" for n in numbers) or "-" for numbers in (trial.lost, trial.seconds))
            console.print(f"{len(trials):4} {trial.fault:<21}{trial.moment:<30} {lost:>5} lost {seconds:>6} s  {said}")
        console.print(table(trials))
    failed = [trial for trial in trials if trial.problems]
    if options.out:
        write_page(options.out, config, trials)
        print(f"written: {options.out}")
    if failed:
        print(f"{len(failed)} of {len(trials)} trials failed; what they left is in {folder}")
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def every_trial(chaos: Chaos, chosen: Sequence[str], options: ChaosOptions) -> Iterator[Trial]:
    """One after the other, the kinds in turn; each has moments of its own, whatever the others are."""
    kinds = list(chaos.kinds(list(chosen)))
    if not kinds:
        raise UsageError(f"--faults {options.faults}: this run can have none of them.")
    for number in range(options.trials):
        name = kinds[number % len(kinds)]
        yield chaos.trial(name, random.Random(f"{options.seed} {name} {number}"), number)


def rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """A line for each kind of fault, and one for all."""
    found = []
    names = [name for name in KINDS if any(trial.fault == name for trial in trials)]
    for name in [*names, "all"]:
        mine = [trial for trial in trials if name in (trial.fault, "all")]
        lost = [steps for trial in mine for steps in trial.lost]
        seconds = [each for trial in mine for each in trial.seconds]
        found.append((
            name, str(len(mine)), str(sum(not trial.problems for trial in mine)),
            f"{mean(lost):.1f}" if lost else "-", str(max(lost)) if lost else "-",
            f"{mean(seconds):.1f}" if seconds else "-", f"{max(seconds):.1f}" if seconds else "-",
        ))
    return found


def table(trials: Sequence[Trial]) -> Table:
    """For the terminal."""
    shown = Table(COLUMNS[0])
    for name in COLUMNS[1:]:
        shown.add_column(name, justify="right")
    for row in rows(trials):
        shown.add_row(*row)
    return shown


def write_page(path: Path, config: RunConfig, trials: Sequence[Trial]) -> None:
    """The table, and every trial."""
    passed = sum(not trial.problems for trial in trials)
    lead = (
        f"{passed} of {len(trials)} faults survived by {config.model.name} on {config.parallel.describe()}: the run "
        "ended with the state of the undisturbed one, and left nothing behind."
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows(trials))
    each = "".join(
        f"<tr><td>{escape(trial.fault)}</td><td>{escape(trial.moment)}</td>"
        f"<td>{escape('; '.join(trial.problems) or 'passed')}</td></tr>"
        for trial in trials
    )
    parts = [
        Fragment(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'),
        Fragment("<h2>Every trial</h2>"),
        Fragment(f'<div class="scroll"><table><tbody>{each}</tbody></table></div>'),
    ]
    path.write_text(page("Faults", lead, parts), encoding="utf-8")


# ---- one long run ----------------------------------------------------------------------------------------------------


def endure(options: ChaosOptions, config: RunConfig, folder: Path, nursery: object, console: Console) -> int:
    """Train for some minutes while ranks are killed, stop, and say what the run reports of itself."""
    train = config.train.model_copy(update={"steps": 10**9})
    data = config.data.model_copy(update={"cache": folder / "cache"})
    config = config.model_copy(update={"train": train, "data": data})
    prepare(config.data)
    place, kills = folder / f"run-{int(time.time())}", []
    new_run(config, place)
    payload = {"config": plain(config), "folder": str(place), "resume": False, "made": True}
    stop = threading.Timer(60 * options.minutes, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    try:
        with failing(place, options.every, random.Random(options.seed), kills):
            Supervisor(config, payload, place, "cpu", survivable=False, nursery=nursery).run()
    finally:
        stop.cancel()
    end = next((event for event in reversed(read_events(place)) if event["event"] == "end"), None)
    if end is None:
        console.print("the run did not come to its end")
        return 1
    seconds = [event["seconds"] for event in read_events(place) if event["event"] == "recovered"]
    recovery = f"{mean(seconds):.1f} s to the next step, {max(seconds):.1f} s at most" if seconds else "none needed"
    console.print(
        f"{end['seconds']:.0f} s; ranks killed: {len(kills)}; effective training time {end['effective']:.1%}; steps "
        f"made again: {end['lost']}; recovery: {recovery}"
    )
    return 0


# ---- where it happens ------------------------------------------------------------------------------------------------


def own_mounts() -> bool:
    """Give this process file systems of its own, by starting the command again; False where that cannot be."""
    if OWN_MOUNTS in os.environ:
        return os.environ[OWN_MOUNTS] == "yes"
    words = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    trial = [*words, "sh", "-c", 'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && umount "$d" && rmdir "$d"']
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode:
        return False
    if Path(sys.argv[0]).name not in ("shoal", "__main__.py"):  # called by other code, whose command line is not ours
        return False
    os.environ[OWN_MOUNTS] = "yes"
    os.execvp("unshare", [*words, sys.executable, "-m", "shoal", *sys.argv[1:]])
    raise AssertionError("replaced by the above")


@contextmanager
def captured(log: Path) -> Iterator[Console]:
    """What this process and its children say goes into a file; gives the terminal, for what the user is to see."""
    sys.stdout.flush()
    sys.stderr.flush()
    ends = [os.dup(1), os.dup(2)]
    with open(log, "ab", buffering=0) as file, open(ends[0], "w", closefd=False) as terminal:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield Console(file=terminal, highlight=False, width=None if terminal.isatty() else 160)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, end in enumerate(ends, start=1):
                os.dup2(end, number)
                os.close(end)
