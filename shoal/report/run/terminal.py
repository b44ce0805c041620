"""The report of a run on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.report.events import event_table
from shoal.report.run.comparison import op_table, rank_table
from shoal.report.run.report import NO_PROFILE, RunReport
from shoal.report.timeline.terminal import show


def print_report(console: Console, report: RunReport) -> None:
    """Print facts, events, the timelines with their tables, and the name of the file."""
    config, compared = report.config, report.comparison
    console.print(Text(f"{report.folder.name}: {config.model.name}, {config.parallel.describe()}", style="bold"))
    _print_facts(console, report.facts())
    if len(happened := event_table(report.events)) > 1:
        console.print()
        _print_table(console, happened)
    if compared is None:
        console.print(Text(NO_PROFILE, style="yellow"))
    else:
        console.print()
        show(console, compared.charts)
        console.print()
        for table in (op_table(compared.measured), rank_table(compared.measured, 16)):
            _print_table(console, table)
            console.print()
        _print_facts(console, compared.facts())
    console.print(Text(f"written: {report.file}"), soft_wrap=True)


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        console.print(Text(f"  {name:<{width}}  {value}"), soft_wrap=True)


def _print_table(console: Console, rows: list[list[str]]) -> None:
    view = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(rows[0]):
        view.add_column(Text(heading), justify="right" if i else "left", overflow="fold")
    for row in rows[1:]:
        view.add_row(*map(Text, row))
    console.print(view)
