"""What came of the trials, as a table for the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rich.table import Table

from shoal.report.page import page
from shoal.report.tables import html_table, text_table
from shoal.spec.config import RunConfig
from shoal.testing.chaos.chaos import Trial
from shoal.testing.chaos.fault_types import KINDS

COLUMNS = ("fault", "tried", "survived", "steps lost, mean", "most", "seconds to recover, mean", "most")


def rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """A row for each kind of fault, and one for all."""
    found: list[tuple[str, ...]] = []
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


def line(number: int, trial: Trial) -> str:
    """One trial: what was done and when, what it cost, and what went wrong."""
    said = "; ".join(trial.problems) or "passed"
    lost = ", ".join(f"{steps:g}" for steps in trial.lost) or "-"
    seconds = ", ".join(f"{each:g}" for each in trial.seconds) or "-"
    return f"{number:4} {trial.fault:<21}{trial.moment:<30} {lost:>5} lost {seconds:>6} s  {said}"


def table(trials: Sequence[Trial]) -> Table:
    """The rows, for the terminal."""
    return text_table(COLUMNS, rows(trials), lines=True)


def write_page(path: Path, config: RunConfig, trials: Sequence[Trial]) -> None:
    """Write the table, and every trial, as a page."""
    passed = sum(not trial.problems for trial in trials)
    lead = (
        f"{passed} of {len(trials)} faults survived by {config.model.name} on {config.parallel.describe()}: the run "
        "ended with the state of the undisturbed one, and left nothing behind."
    )
    each = [(trial.fault, trial.moment, "; ".join(trial.problems) or "passed") for trial in trials]
    parts = [html_table(rows(trials), COLUMNS), "<h2>Every trial</h2>", html_table(each)]
    path.write_text(page("Faults", lead, parts), encoding="utf-8")
