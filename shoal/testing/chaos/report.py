"""Outcome of the trials, as a table for the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from shoal.report.page import page
from shoal.report.tables import html_table
from shoal.spec.config import RunConfig
from shoal.testing.chaos.chaos import Trial
from shoal.testing.chaos.fault_types import KINDS

COLUMNS = ("fault", "tried", "survived", "steps lost, mean", "most", "seconds to recover, mean", "most")


def count_by_fault(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return a row for each kind of fault, and one for all."""
    rows: list[tuple[str, ...]] = []
    names = [name for name in KINDS if any(trial.fault == name for trial in trials)]
    for name in [*names, "all"]:
        mine = [trial for trial in trials if name in (trial.fault, "all")]
        lost = [steps for trial in mine for steps in trial.lost]
        seconds = [each for trial in mine for each in trial.seconds]
        rows.append((
            name, str(len(mine)), str(sum(not trial.problems for trial in mine)),
            f"{mean(lost):.1f}" if lost else "-", str(max(lost)) if lost else "-",
            f"{mean(seconds):.1f}" if seconds else "-", f"{max(seconds):.1f}" if seconds else "-",
        ))
    return rows


def describe_trial(number: int, trial: Trial) -> str:
    """Return a line: fault, moment, cost and problems."""
    outcome = "; ".join(trial.problems) or "passed"
    lost = ", ".join(f"{steps:g}" for steps in trial.lost) or "-"
    seconds = ", ".join(f"{each:g}" for each in trial.seconds) or "-"
    return f"{number:4} {trial.fault:<21}{trial.moment:<30} {lost:>5} lost {seconds:>6} s  {outcome}"


def write_page(path: Path, config: RunConfig, trials: Sequence[Trial]) -> None:
    """Write a page with the table and every trial."""
    passed = sum(not trial.problems for trial in trials)
    lead = (
        f"{passed} of {len(trials)} faults survived by {config.model.name} on {config.parallel.describe()}: the run "
        "ended with the state of the undisturbed one, with no remains."
    )
    each = [(trial.fault, trial.moment, "; ".join(trial.problems) or "passed") for trial in trials]
    parts = [html_table(count_by_fault(trials), COLUMNS), "<h2>Every trial</h2>", html_table(each)]
    path.write_text(page("Faults", lead, parts), encoding="utf-8")
