"""Base class of the benchmarks, and their options, progress, tables and files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import write_atomically
from shoal.base.section import Section
from shoal.engine.device import usable_cores
from shoal.report.tables import text_table

TIME_LIMIT = 24 * 3600.0
"""Seconds after which a measurement on worker processes counts as hung. No formula predicts how long it takes, because
all ranks may share a core."""

Row = Mapping[str, Any]
"""One line of a table: a value for each column."""
Notify = Callable[[str], None]
"""Function that shows what is measured next."""


class Benchmark(Section):
    """One measurement of `shoal bench`: the fields of a subclass are its options, and its docstring is the help."""

    @abstractmethod
    def run(self, console: Console, notify: Notify) -> bool:
        """Measure, and print the results on the console; return False if a target is missed.

        Raises:
            UsageError: the options do not go together.
        """


@contextmanager
def show_progress(console: Console) -> Iterator[Notify]:
    """Yield a function that shows what is measured next: on a terminal in a line that changes, otherwise as lines on
    stderr, so that a file of the results contains nothing else."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print


def choose_names(given: str, known: Iterable[str], option: str, separator: str = ",") -> list[str]:
    """Split the value of an option into names. An empty value and "all" select all known names.

    Raises:
        UsageError: a name is unknown.
    """
    known = list(known)
    names = [name.strip() for name in given.split(separator) if name.strip()]
    if names in ([], ["all"]):
        return known
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {given}: '{name}' is unknown; {did_you_mean(name, known)}")
    return names


def check_folder(path: Path | None, option: str) -> None:
    """Raise a UsageError that names the option if a folder does not exist."""
    if path is not None and not path.is_dir():
        raise UsageError(f"{option} {path}: no such folder. Create it, or name another.")


def make_folder(path: Path | None, option: str) -> None:
    """Make a folder for results, in one that exists; raise a UsageError that names the option if this fails."""
    if path is None:
        return
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}. Name a folder in one that exists.") from None


def make_table(title: str, rows: Sequence[Row], above: str | None = None) -> Table:
    """Return a table for the terminal, with a column for each key of the rows. The value of the key ``above`` is a
    heading above consecutive rows that share it."""
    columns = [name for name in rows[0] if name != above]
    lines: list[list[str | Text]] = []
    for heading, group in groupby(rows, lambda row: row.get(above) if above else None):
        if heading:
            lines += [[], [Text(heading, "bold")]]
        lines += [[format_cell(row[name]) for name in columns] for row in group]
    return text_table(columns, lines, title=title)


def format_cell(value: object) -> str | Text:
    """Format numbers with four digits, and verdicts in colour."""
    if isinstance(value, float) and math.isfinite(value) and value:
        digits = 3 - math.floor(math.log10(abs(value)))
        return f"{value:,.{max(0, digits)}f}" if digits < 7 else f"{value:.0e}"
    if isinstance(value, bool):
        return Text("yes", "green") if value else Text("no", "red")
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, Text) else "" if value is None else str(value)


def all_met(rows: Sequence[Row]) -> bool:
    """Return whether no row misses its target; "met" is None in rows without a target."""
    return all(row["met"] is not False for row in rows)


def write_records(records: Sequence[Row], out: Path) -> None:
    """Write records as CSV, or as JSON together with the machine they were measured on, by the file's extension."""
    if out.suffix == ".json":
        write_atomically(out, json.dumps({"machine": describe_machine(), "rows": records}, indent=1) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0])
    writer.writeheader()
    writer.writerows(records)
    write_atomically(out, text.getvalue())


def describe_machine() -> str:
    """Return torch's version, and this machine's architecture, cores and load, in one line."""
    return (
        f"torch {torch.__version__}, {platform.machine()}, {usable_cores()} cores, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
