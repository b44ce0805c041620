"""What the benchmarks share: options that can run, progress, the choice of names, tables and their files."""

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
from rich import box
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import write_whole
from shoal.base.section import Section
from shoal.engine.device import usable_cores

Row = Mapping[str, Any]
"""One line of a table: a value for each column."""
Say = Callable[[str], None]
"""Called with what is measured next."""


class Benchmark(Section):
    """One measurement of `shoal bench`: the fields of a subclass are its options, and its docstring is the help."""

    @abstractmethod
    def run(self, console: Console, say: Say) -> bool:
        """Measure, and print the results on the console.

        Args:
            say: shows what is measured next.

        Returns:
            False if a target is missed.

        Raises:
            UsageError: the options do not go together.
        """


@contextmanager
def progress(console: Console) -> Iterator[Say]:
    """Yield a function that shows what is measured next: on a terminal in a line that changes, else as lines on the
    standard error, so that a file of the results has the results alone.

    Args:
        console: where results are printed.
    """
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print


def choose_names(given: str, known: Iterable[str], option: str, separator: str = ",") -> list[str]:
    """Split the value of an option into names; an empty one and "all" mean all known names.

    Raises:
        UsageError: a name is not known.
    """
    known = list(known)
    names = [name.strip() for name in given.split(separator) if name.strip()]
    if names in ([], ["all"]):
        return known
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {given}: there is no '{name}'; {did_you_mean(name, known)}")
    return names


def check_folder(path: Path | None, option: str) -> None:
    """Refuse a folder that does not exist.

    Raises:
        UsageError: naming the option.
    """
    if path is not None and not path.is_dir():
        raise UsageError(f"{option} {path}: there is no such folder.")


def make_table(title: str, rows: Sequence[Row], above: str = "") -> Table:
    """A table for the terminal: a column for each key of the rows.

    Args:
        above: the key whose value stands above the consecutive rows that have the same one.
    """
    view = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = [name for name in rows[0] if name != above]
    for number, name in enumerate(columns):
        view.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for heading, group in groupby(rows, lambda row: row.get(above)):
        if heading:
            view.add_section()
            view.add_row(f"[bold]{heading}")
        for row in group:
            view.add_row(*(_cell(row[name]) for name in columns))
    return view


def _cell(value: object) -> str:
    """A value for people: four digits of a number, and a verdict in colour."""
    if isinstance(value, float) and math.isfinite(value) and value:
        digits = 3 - math.floor(math.log10(abs(value)))
        return f"{value:,.{max(0, digits)}f}" if digits < 7 else f"{value:.0e}"
    if value is None or isinstance(value, bool):
        return {None: "", True: "[green]yes", False: "[red]no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def all_met(rows: Sequence[Row]) -> bool:
    """Whether no row misses its target: under "met" is None where there is no target."""
    return all(row["met"] is not False for row in rows)


def write_records(records: Sequence[Row], out: Path) -> None:
    """Write records as CSV, or as JSON with the machine that they were measured on, by the file's ending."""
    if out.suffix == ".json":
        write_whole(out, json.dumps({"machine": describe_machine(), "rows": records}, indent=1) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0])
    writer.writeheader()
    writer.writerows(records)
    write_whole(out, text.getvalue())


def describe_machine() -> str:
    """Torch's version, the architecture, the cores and the load of this machine, in one line."""
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"torch {torch.__version__}, {platform.machine()}, {usable_cores()} cores{load}"
