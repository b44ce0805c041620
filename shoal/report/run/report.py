"""Report of a run: curves, events, and its recorded step beside the simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.units import show_bytes
from shoal.report.curves import draw_curves
from shoal.report.events import effective_facts, event_table
from shoal.report.histograms import histograms
from shoal.report.page import HELP, Fragment, comparison, page, timelines
from shoal.report.run.comparison import Comparison, op_table, rank_table
from shoal.report.tables import html_table, html_tiles
from shoal.report.timeline.measured import MeasuredStep
from shoal.report.timeline.write import KINDS, write
from shoal.spec.config import RUN_FILE, RunConfig, load_config
from shoal.training.records.histograms import read_histograms
from shoal.training.records.metrics import StepMetrics, read_metrics
from shoal.training.records.profile import read_profile
from shoal.training.resilience.events import read_events

PAGE = "report.html"
NO_PROFILE = "No step was profiled: start or resume the run with --profile to see its timeline."


@dataclass(frozen=True)
class RunReport:
    """Data of a run's report.

    Attributes:
        folder: run folder.
        file: file that the report was written to.
        config: config of the run.
        metrics: one record per logged step.
        events: recorded failures, restarts and recoveries.
        comparison: the recorded step beside the simulated one; None if no step was recorded.
    """

    folder: Path
    file: Path
    config: RunConfig
    metrics: list[StepMetrics]
    events: list[dict[str, Any]]
    comparison: Comparison | None

    def facts(self) -> list[tuple[str, str]]:
        """Return the run in numbers, as (name, value)."""
        last = self.metrics[-1]
        validation = next((m.validation_loss for m in reversed(self.metrics) if m.validation_loss is not None), None)
        facts = [("steps done", f"{last.step} of {last.steps}"), ("loss", f"{last.loss:.4f}")]
        if validation is not None:
            facts.append(("validation loss", f"{validation:.4f}"))
        rates = [m.tokens_per_second for m in self.metrics[1:] or self.metrics]
        facts.append(("tokens per second (median)", f"{median(rates):,.0f}"))
        if last.mfu is not None:
            facts.append(("model FLOPs utilisation", f"{100 * last.mfu:.1f} %"))
        facts.append(("peak memory of a rank", show_bytes(max(m.memory_bytes for m in self.metrics))))
        return facts + effective_facts(self.events)


def write_report(run_folder: str | Path, out: str | Path | None = None) -> RunReport:
    """Write the report of a run as a page, or its recorded step as a figure or a trace.

    Args:
        run_folder: folder of the run, which may still be active.
        out: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz); figures and traces only show the
            timelines. None for ``report.html`` in the run folder.

    Returns:
        The data of the report.

    Raises:
        UsageError: no such run, nothing has been logged yet, the file cannot be written, or a figure or trace is
            requested and no step was recorded.

    >>> import shoal
    >>> report = shoal.write_report("runs/example")
    >>> report.file.name, len(report.metrics), dict(report.facts())["steps done"]
    ('report.html', 2, '2 of 2')
    """
    folder = Path(run_folder)
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is not a run folder: it has no {RUN_FILE}.")
    file = Path(out) if out else folder / PAGE
    check_writable(file, "--out", *KINDS)
    config, metrics, profile = load_config(folder / RUN_FILE), read_metrics(folder), read_profile(folder)
    if not metrics:
        raise UsageError(f"{folder}: nothing has been logged yet.\n  Wait for the first step.")
    if profile is None and file.suffix != ".html":
        raise UsageError(f"{file}: a figure or a trace needs timelines.\n  {NO_PROFILE}")
    compared = Comparison.simulate(MeasuredStep.from_profile(profile)) if profile else None
    report = RunReport(folder, file, config, metrics, read_events(folder), compared)
    if file.suffix == ".html":
        file.write_text(_html(report), encoding="utf-8")
    elif compared:
        write(file, compared.charts, title=folder.name, lead="")
    return report


# ---- the page -------------------------------------------------------------------------------------------------------


def _html(report: RunReport) -> str:
    config, compared = report.config, report.comparison
    lead = f"{config.model.name}, {config.parallel.describe()}, {config.train.precision}."
    parts: list[Fragment | str] = [html_tiles(report.facts()), draw_curves(report.metrics)]
    if len(happened := event_table(report.events)) > 1:
        parts += ["<h2>Events</h2>", _table(happened)]
    if recorded := read_histograms(report.folder):
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
        parts.append(f"<h2>One step</h2><p>{escape(NO_PROFILE)}</p>")
    return page(report.folder.name, lead, parts)


HOW = (
    "The simulation plays the same program with the mean recorded time of each op and stage, and with the median time "
    "of the messages that a rank waited for. It therefore does not include the variation of these times. Played with "
    "the times of each step, the remaining difference is the error of the simulation itself."
)


def _table(table: list[list[str]]) -> str:
    headings, *rows = table
    return html_table(rows, headings)
