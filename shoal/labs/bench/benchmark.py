"""What the benchmarks share: options that can run, progress, the choice of names, tables and their files."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import write_whole
from shoal.base.section import Section
from shoal.engine.device import usable_cores

Row = TypeVar("Row")
Say = Callable[[str], None]
"""Called with what is measured next."""

VERDICTS = {None: "", True: "[green]yes", False: "[red]no"}
"""How a table shows whether a target is met; None where there is no target."""


class Benchmark(Section):
    """One measurement of `shoal bench`: the fields of a subclass are its options, and its docstring is the help."""

    def run(self, console: Console, say: Say) -> bool:
        """Measure, and print the results on the console.

        Args:
            say: shows what is measured next.

        Returns:
            False if a target is missed.

        Raises:
            UsageError: the options do not go together.
        """
        raise NotImplementedError


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


def make_table(
    title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], object]], *,
    heading: Callable[[Row], str] = lambda row: "", style: Callable[[Row], str] = lambda row: "",
) -> Table:
    """A table for the terminal: a function for each column makes its cell of a row.

    Args:
        heading: stands above consecutive rows that have the same one.
        style: of a row, as rich calls it.
    """
    view = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        view.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for above, group in groupby(rows, heading):
        if above:
            view.add_section()
            view.add_row(f"[bold]{above}")
        for row in group:
            view.add_row(*(str(cell(row)) for cell in columns.values()), style=style(row))
    return view


def write_records(records: Sequence[Mapping[str, Any]], out: Path) -> None:
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
