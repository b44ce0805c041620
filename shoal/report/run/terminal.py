"""Report of a run in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shoal.report.events import event_table
from shoal.report.run.comparison import op_table, rank_table
from shoal.report.run.report import NO_PROFILE, RunReport
from shoal.report.tables import text_table
from shoal.report.timeline.terminal import show


def print_report(console: Console, report: RunReport) -> None:
    """Print facts, events, the timelines with their tables, and the name of the file."""
    config, compared = report.config, report.comparison
    console.print(Text(f"{report.folder.name}: {config.model.name}, {config.parallel.describe()}", style="bold"))
    console.print(text_table(("", ""), report.facts(), words=(0, 1)))
    if len(happened := event_table(report.events)) > 1:
        console.print()
        console.print(text_table(happened[0], happened[1:], words=(0, 1, 4)))
    if compared is None:
        console.print(Text(NO_PROFILE, style="yellow"))
    else:
        console.print()
        show(console, compared.charts)
        console.print()
        for headings, *rows in (op_table(compared.measured), rank_table(compared.measured, 16)):
            console.print(text_table(headings, rows), "")
        console.print(text_table(("", ""), compared.facts(), words=(0, 1)))
    console.print(Text(f"written: {report.file}"), soft_wrap=True)


