"""Report of a run, as a page and in the terminal: curves, events, and its recorded step beside the simulated one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path, PurePath
from statistics import median
from typing import Any
from urllib.parse import quote

import tomli_w
from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable, write_atomically
from shoal.base.terminal import printable
from shoal.base.units import show_bytes, show_seconds
from shoal.report.curves import curves, describe_curves
from shoal.report.page import HELP, Fragment, comparison, page, timelines
from shoal.report.tables import html_table, html_tiles, text_table
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.measured import MeasuredStep
from shoal.report.timeline.palette import NAMES
from shoal.report.timeline.terminal import show
from shoal.report.timeline.write import KINDS, write
from shoal.spec.config import RUN_FILE, RunConfig, load_config, suggest_run
from shoal.training.records.histograms import read_histograms
from shoal.training.records.metrics import StepMetrics, read_metrics
from shoal.training.records.profile import FOLDER, IncompleteProfileError, read_profile
from shoal.training.resilience.events import read_events

PAGE = "report.html"
NO_PROFILE = "No step was profiled: start or resume the run with --profile to see its timeline."
HOW = (
    "The simulation plays the same program with the mean recorded time of each op and stage, and with the median time "
    "of the messages that a rank waited for. It therefore does not include the variation of these times. Played with "
    "the times of each step, the remaining difference is the error of the simulation itself."
)
OWN_COLUMN = ("time", "event", "rank", "step", "report")
EVENTS = "<h2>Events</h2><div class=wrap>{}</div>"
LEFT_OUT = ("end", "restart")  # shown in the facts, and by the events that follow


@dataclass(frozen=True)
class Comparison:
    """The recorded steps, and the charts of the simulated step and of the typical measured one."""

    measured: MeasuredStep
    charts: tuple[Chart, Chart]

    @staticmethod
    def simulate(measured: MeasuredStep) -> Comparison:
        """Simulate the program with the measured times."""
        step = measured.profile.ranks[0].steps[measured.typical] + 1
        simulated, typical = measured.simulated(), measured.timeline(measured.typical)
        lane = "pp" if len(measured.profile.ranks) > typical.ranks else "rank"
        charts = (
            Chart("simulated, with the mean times", simulated, lane=lane),
            Chart(f"measured, step {step}", typical, lane=lane),
        )
        return Comparison(measured, charts)

    @property
    def difference(self) -> float:
        """Relative difference of the predicted step time from the mean measured one."""
        return self.charts[0].timeline.step_time / self.measured.step_time - 1

    def facts(self) -> list[tuple[str, str]]:
        """Return the comparison in numbers, as (name, value)."""
        simulated, measured = (chart.timeline for chart in self.charts)
        slowest, busy, _ = max(self.measured.by_rank(), key=lambda entry: entry[1])
        steps = len(self.measured.step_times)
        return [
            (f"measured step (mean of {steps})", show_seconds(self.measured.step_time)),
            ("simulated step", show_seconds(simulated.step_time)),
            ("difference", f"{100 * self.difference:+.1f} %"),
            ("with each step's own times", f"{100 * self.measured.replayed:+.1f} %"),
            ("bubble, measured / simulated", f"{100 * measured.bubble:.1f} / {100 * simulated.bubble:.1f} %"),
            (f"a step's computations, busiest rank ({slowest.rank})", show_seconds(busy)),
        ]


@dataclass(frozen=True)
class RunReport:
    """Data of a run's report.

    Attributes:
        file: file that the report was written to.
        metrics: one record per logged step.
        events: recorded failures, restarts and recoveries.
        comparison: the recorded step beside the simulated one; None if no step was recorded.
        no_timeline: why, if there is none.
    """

    folder: Path
    file: Path
    config: RunConfig
    metrics: list[StepMetrics]
    events: list[dict[str, Any]]
    comparison: Comparison | None = None
    no_timeline: str = NO_PROFILE

    def __repr__(self) -> str:
        last = self.metrics[-1]
        loss = "" if last.loss is None else f", loss {last.loss:.4f}"
        return f"<RunReport: {printable(self.folder.name)}, step {last.step} of {last.steps}{loss}: {self.file}>"

    @property
    def layout(self) -> str:
        """Layout that the run has now, which the newest event that names one changed."""
        named = (event["layout"] for event in reversed(self.events) if isinstance(event.get("layout"), str))
        return printable(next(named, self.config.parallel.describe()))

    def facts(self) -> list[tuple[str, str]]:
        """Return the run in numbers, as (name, value)."""
        last = self.metrics[-1]
        validation = next((m.validation_loss for m in reversed(self.metrics) if m.validation_loss is not None), None)
        loss = "-" if last.loss is None else f"{last.loss:.4f}"
        facts = [("steps done", f"{last.step} of {last.steps}"), ("loss", loss)]
        if validation is not None:
            facts.append(("validation loss", f"{validation:.4f}"))
        timed = self.metrics[1:] or self.metrics  # the first step also warms up
        rate = median(m.tokens_per_second for m in timed)
        facts.append((f"{self.config.counted}s per second (median)", f"{rate:,.0f}"))
        if used := [m.mfu for m in timed if m.mfu is not None]:
            facts.append(("model FLOPs utilisation (median)", f"{100 * median(used):.1f} %"))
        facts.append(("peak memory of a rank", show_bytes(max(m.memory_bytes for m in self.metrics))))
        if traces := sorted(file.name for file in (self.folder / FOLDER).glob("trace-rank-*")):
            facts.append(("operators and kernels, for Perfetto", f"{FOLDER}/{traces[0]}, {len(traces)} in all"))
        return facts + effective_facts(self.events)


def write_report(run_folder: str | Path, out: str | Path | None = None) -> RunReport:
    """Write the report of a run as a page, or its recorded step as a figure or a trace.

    Args:
        run_folder: folder of the run, which may still be active.
        out: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz); figures and traces only show the
            timelines. None for ``report.html`` in the run folder.

    Raises:
        UsageError: no such run, nothing has been logged yet, the file cannot be written, or a figure or trace is
            requested and no step was recorded.

    >>> import shoal
    >>> report = shoal.write_report("runs/example")
    >>> report.file.name, len(report.metrics), dict(report.facts())["steps done"]
    ('report.html', 2, '2 of 2')
    """
    folder = Path(run_folder)
    config = open_run(folder)
    file = Path(out) if out else folder / PAGE
    check_writable(file, "--out", *KINDS)
    report = replace(read_run(folder, config), file=file)
    try:
        report = replace(report, comparison=read_comparison(folder))
    except IncompleteProfileError as error:
        report = replace(report, no_timeline=str(error))
    if file.suffix == ".html":
        write_atomically(file, _html(report))
    elif report.comparison:
        write(file, report.comparison.charts, title=folder.name, lead="")
    else:
        raise UsageError(f"{file}: a figure or a trace needs timelines.\n  {report.no_timeline}")
    return report


def open_run(folder: Path) -> RunConfig:
    """Return the config of a run.

    Raises:
        UsageError: the folder is not that of a run, or its config is wrong.
    """
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is not a run folder: it has no {RUN_FILE}.{suggest_run(folder)}")
    return load_config(folder / RUN_FILE)


def read_run(folder: Path, config: RunConfig) -> RunReport:
    """Read a run's metrics and events.

    Raises:
        UsageError: nothing has been logged yet, or a file is damaged.
    """
    if not (metrics := read_metrics(folder)):
        raise UsageError(f"{folder}: nothing has been logged yet.\n  Wait for the first step.")
    return RunReport(folder, folder / PAGE, config, metrics, read_events(folder))


def read_comparison(folder: Path) -> Comparison | None:
    """Read a run's recorded step and simulate it; None if no step was recorded."""
    profile = read_profile(folder)
    return Comparison.simulate(MeasuredStep.from_profile(profile)) if profile else None


# ---- facts and tables ------------------------------------------------------------------------------------------------


def effective_facts(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the effective training time and its losses, as (name, value), over all completed starts of the run."""
    ends = [event for event in events if event["event"] == "end"]
    if not ends:
        return []
    seconds, counted, failures, lost = (
        sum(event[name] for event in ends) for name in ("seconds", "counted", "failures", "lost")
    )
    facts = [("effective training time", f"{100 * counted / max(seconds, 1e-9):.1f} %")]
    if failures:
        facts += [("failures", f"{failures}"), ("repeated steps", f"{lost}")]
    recoveries = [event["seconds"] for event in events if event["event"] == "recovered"]
    if recoveries:
        facts.append(("seconds to recover (mean)", f"{sum(recoveries) / len(recoveries):.1f}"))
    return facts


def event_table(events: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the headings, then a row for each event that is not shown elsewhere."""
    rows = [["when", "what", "rank", "step", "how"]]
    for event in events:
        if event["event"] in LEFT_OUT:
            continue
        how = ", ".join(_format(name, value) for name, value in event.items()
                        if name not in OWN_COLUMN and value != {})
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        rows.append([when, event["event"], *(str(event.get(name, "–")) for name in ("rank", "step")), how])
    return rows


def _format(name: str, value: object) -> str:
    if name in ("how", "where"):
        return str(value)
    if name == "recordings" and isinstance(value, list):
        return f"recorded before: {PurePath(value[0]).parent}, {len(value)} files" if value else ""
    if isinstance(value, list):
        value = ", ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    if isinstance(value, dict):  # fields that a resume changed
        value = ", ".join(f"{field} = {new}" for field, new in value.items())
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def op_table(measured: MeasuredStep) -> list[list[str]]:
    """Return the headings, then a row for each op and stage."""
    rows = [["action", "stage", "recorded", "median", "mean", "longest"]]
    for op, stage, count, *times in measured.by_op():
        lengths = (show_seconds(time) for time in times)
        rows.append([NAMES[op], str(stage) if stage >= 0 else "–", f"{count:,}", *lengths])
    return rows


def rank_table(measured: MeasuredStep, most: int = 64) -> list[list[str]]:
    """Return the headings, then a row for each rank; at most the ``most`` ranks that compute longest.

    Reductions, the optimizer and waiting are what a rank does in the part of a step in which it does not compute.
    """
    found = sorted(measured.by_rank(), key=lambda entry: -entry[1])
    shown = sorted(found[:most], key=lambda entry: entry[0].rank)
    rows = [["rank", "pp", "dp", "tp", "computing a step", "waiting for messages", "not computing"]]
    for rank, busy, waiting in shown:
        numbers = (str(n) for n in (rank.rank, rank.pp, rank.dp, rank.tp))
        share = 1 - busy / measured.step_time
        rows.append([*numbers, show_seconds(busy), show_seconds(waiting), f"{100 * share:.1f} %"])
    return rows


# ---- the terminal ----------------------------------------------------------------------------------------------------


def print_report(console: Console, report: RunReport) -> None:
    """Print facts, events, the timelines with their tables, and the name of the file."""
    config, compared = report.config, report.comparison
    title = f"{report.folder.name}: {config.model.title}, {report.layout}"
    console.print(Text(printable(title), style="bold"))
    console.print(text_table(("", ""), report.facts(), words=(0, 1)))
    if len(happened := event_table(report.events)) > 1:
        console.print()
        console.print(text_table(happened[0], happened[1:], words=(0, 1, 4)))
    if compared is None:
        console.print(Text(printable(report.no_timeline), style="yellow"), soft_wrap=True)
    else:
        console.print()
        show(console, compared.charts)
        console.print()
        for headings, *rows in (op_table(compared.measured), rank_table(compared.measured, 16)):
            console.print(text_table(headings, rows), "")
        console.print(text_table(("", ""), compared.facts(), words=(0, 1)))
    console.print(Text(printable(f"written: {report.file}")), soft_wrap=True)


# ---- the page -------------------------------------------------------------------------------------------------------


def _html(report: RunReport) -> str:
    config, compared = report.config, report.comparison
    lead = f"{config.model.title}, {report.layout}, {config.train.precision}."
    shown = describe_curves(
        report.folder.name, report.metrics, report.events, config.counted, config.parallel.describe()
    )
    parts: list[Fragment | str] = [html_tiles(report.facts()), curves([shown])]
    if len(happened := event_table(report.events)) > 1:
        parts.append(EVENTS.format(_table(happened)))
    parts += _recordings(report)
    if recorded := read_histograms(report.folder):
        from shoal.report.histograms import histograms  # slow import

        parts.append(histograms(*recorded))
    if compared:
        parts += [
            "<h2>One step: measured under simulated</h2>",
            html_tiles(compared.facts()),
            f"<p class=note>{escape(HOW)}</p>",
            comparison(compared.charts, mark=False),
            timelines(compared.charts),
            HELP,
            "<h2>Times of the actions</h2>",
            _table(op_table(compared.measured)),
            "<h2>The ranks</h2>",
            _table(rank_table(compared.measured)),
        ]
    else:
        parts.append(f"<h2>One step</h2><p>{escape(report.no_timeline)}</p>")
    changed = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    parts.append(f"<h2>Config, where it is not the default</h2><pre>{escape(tomli_w.dumps(changed))}</pre>")
    return page(report.folder.name, lead, parts)


def _recordings(report: RunReport) -> list[str]:
    """Return links to what ranks had recorded before failures, if it is still there."""
    links = []
    for event in report.events:
        for name in event.get("recordings", ()):
            file = report.folder / PurePath(name)
            if PurePath(name).parts[:1] == ("logs",) and ".." not in PurePath(name).parts and file.is_file():
                target = quote(os.path.relpath(file, report.file.parent))
                links.append(f'<li><a href="{escape(target)}">{escape(printable(name))}</a></li>')
    return ["<h2>Recorded before failures</h2>", f"<ul>{''.join(links)}</ul>"] if links else []


def _table(table: list[list[str]]) -> str:
    headings, *rows = table
    return html_table(rows, headings)
