"""`shoal watch`: a local page of one or more runs that follows them, or the same page as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError, redact
from shoal.base.files import check_writable, write_atomically
from shoal.base.terminal import printable
from shoal.report.curves import curves, describe_curves
from shoal.report.page import HELP, Fragment, page, timelines
from shoal.report.run import EVENTS, NO_PROFILE, RunReport, event_table, open_run, read_comparison, read_run
from shoal.report.server import LocalPage, PageServer, ServedFile
from shoal.report.tables import html_table, html_tiles

CONNECT = "connect-src 'self'"


class WatchedRun:
    """A run whose files are read again when they have changed."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.config = folder, name, open_run(folder)
        self._seen: list[tuple[int, int]] | None = None
        self._report: RunReport | UsageError = UsageError("not read yet")

    def read(self) -> RunReport | UsageError:
        """Return the run's data, or why it cannot be shown yet or any more."""
        seen = [self._state(name) for name in ("metrics.jsonl", "events.jsonl")]
        if seen != self._seen:
            try:
                self._report = read_run(self.folder, self.config)
            except UsageError as error:
                self._report = error
            self._seen = seen
        return self._report

    def _state(self, name: str) -> tuple[int, int]:
        try:
            found = (self.folder / name).stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size


class WatchedRuns:
    """The runs of one page."""

    def __init__(self, folders: Sequence[Path]):
        names = [folder.resolve().name for folder in folders]
        shown = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
        self.runs = [WatchedRun(folder, name) for folder, name in zip(folders, shown, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Return what the page shows and asks for again: curves, and tables as markup."""
        found = [(run.name, run.read()) for run in self.runs]
        reports = {name: report for name, report in found if isinstance(report, RunReport)}
        errors = [f"<p>{_text(f'{name}: {error}')}</p>" for name, error in found if isinstance(error, UsageError)]
        return {
            "runs": [
                describe_curves(
                    run.name, report.metrics, report.events, run.config.counted, run.config.parallel.describe()
                )
                if isinstance(report, RunReport) else describe_curves(run.name, [], [])
                for run, (_, report) in zip(self.runs, found, strict=True)
            ],
            "facts": "".join(errors) + _facts(reports),
            "events": _events(reports),
        }  # fmt: skip

    def html(self, *, live: bool) -> str:
        """Return the page; the timelines of recorded steps are as of now."""
        shown = self.describe()
        parts: list[Fragment | str] = [
            f'<div id="facts">{shown["facts"]}</div>', curves(shown["runs"], live=live),
            f'<div id="events">{shown["events"]}</div>', *self._timelines(),
        ]  # fmt: skip
        names = ", ".join(printable(run.name) for run in self.runs)
        lead = "Follows the run while it trains." if live else "As of the time when this page was written."
        return page(names, lead, parts, policy=CONNECT if live else "")

    def _timelines(self) -> list[Fragment | str]:
        charts, why = [], NO_PROFILE
        for run in self.runs:
            try:
                compared = read_comparison(run.folder)
            except UsageError as error:  # damaged, or being written: the other parts of the page do not need it
                why = str(error)
                continue
            if compared:
                chart = compared.charts[1]
                charts.append(replace(chart, name=f"{printable(run.name)}: {chart.name}"))
        if not charts:
            return [f"<h2>One step</h2><p>{_text(why)}</p>"]
        return ["<h2>One step</h2>", timelines(charts), HELP]


def _text(text: str) -> str:
    return escape(printable(redact(text)))


def _facts(reports: dict[str, RunReport]) -> str:
    """Return the facts as tiles, or of several runs as a table with a column for each."""
    if len(reports) == 1:
        [report] = reports.values()
        return html_tiles([*report.facts(), ("layout", report.layout)])
    if not reports:
        return ""
    facts = {
        name: {"layout": report.layout, **dict(report.facts())} for name, report in reports.items()
    }
    rows = dict.fromkeys(fact for each in facts.values() for fact in each)
    table = [[row, *(each.get(row, "–") for each in facts.values())] for row in rows]
    return html_table(table, ["", *map(printable, facts)])


def _events(reports: dict[str, RunReport]) -> str:
    """Return a table of the events of all runs, newest first."""
    several, rows, headings = len(reports) > 1, [], [""]
    for name, report in reports.items():
        headings, *found = event_table(report.events)
        rows += [[printable(name)] * several + [printable(cell) for cell in row] for row in found]
    if not rows:
        return ""
    rows.sort(key=lambda row: row[several], reverse=True)
    return EVENTS.format(html_table(rows, ["run"] * several + headings))


def build_page(watched: WatchedRuns) -> LocalPage:
    """Return the live page of runs, and the call by which it asks for new values."""
    files = {"": ServedFile("text/html", lambda: watched.html(live=True))}
    return LocalPage(files, {"runs": lambda _: watched.describe()})


def watch(
    folders: str | Path | Sequence[str | Path], *, out: str | Path | None = None, port: int = 0, browser: bool = True
) -> Path | None:
    """Serve a page that follows runs, on 127.0.0.1, until Ctrl-C; or write it as a file.

    Args:
        folders: one or several run folders, which may still be active. Nothing else is read.
        out: file to write (.html), with all figures as of now; its path is returned.
        port: port of the server; 0 for a free one.
        browser: open the page in the user's browser.

    Raises:
        UsageError: no such run, the port is taken, or the file cannot be written.

    >>> import shoal
    >>> shoal.watch("runs/example", out="runs/compared.html").name
    'compared.html'
    """
    watched = WatchedRuns([Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)])
    if out is not None:
        check_writable(Path(out), "--out", ".html")
        write_atomically(Path(out), watched.html(live=False))
        return Path(out)
    PageServer(build_page(watched), port).run(browser=browser)
    return None
