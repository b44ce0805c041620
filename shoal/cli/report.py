"""`shoal report`: how a run went; and its recorded step under the simulated one, with the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.report.curves import curves
from shoal.report.events import effective_facts, event_table
from shoal.report.histograms import histograms
from shoal.report.page import HELP, Fragment, comparison, page, timelines
from shoal.report.timeline.chart import Chart, amount, span
from shoal.report.timeline.measured import MeasuredStep
from shoal.report.timeline.palette import NAMES
from shoal.report.timeline.terminal import show
from shoal.report.timeline.write import check_name, write
from shoal.spec.config import RUN_FILE, RunConfig, load_config
from shoal.training.records.histograms import read_histograms
from shoal.training.records.metrics import StepMetrics, read_metrics
from shoal.training.records.profile import read_profile
from shoal.training.resilience.events import read_events

PAGE = "report.html"
NO_PROFILE = "No step was recorded action by action: start or resume the run with --profile to see its timeline."


@dataclass(frozen=True)
class Comparison:
    """A measured step and the simulated one.

    Attributes:
        measured: all that was recorded.
        charts: the simulated step, then the typical measured one.
    """

    measured: MeasuredStep
    charts: tuple[Chart, Chart]

    @staticmethod
    def of(measured: MeasuredStep) -> Comparison:
        """Play the program with the measured times."""
        step = measured.profile.ranks[0].steps[measured.typical] + 1
        charts = (
            Chart("simulated, with the mean times", measured.simulated()),
            Chart(f"measured, step {step}", measured.timeline(measured.typical)),
        )
        return Comparison(measured, charts)

    @property
    def predicted(self) -> float:
        """Step time of the simulation [s]."""
        return self.charts[0].timeline.step_time

    @property
    def difference(self) -> float:
        """Of the predicted step time from the mean of the measured ones, as a part of the latter."""
        return self.predicted / self.measured.step_time - 1

    def facts(self) -> list[tuple[str, str]]:
        """What is said first, as (name, value)."""
        simulated, measured = (chart.timeline for chart in self.charts)
        slowest, busy, _ = max(self.measured.by_rank(), key=lambda entry: entry[1])
        steps = len(self.measured.step_times)
        return [
            (f"measured step (mean of {steps})", span(self.measured.step_time, seconds=True)),
            ("simulated step", span(self.predicted, seconds=True)),
            ("difference of the simulated", f"{100 * self.difference:+.1f} %"),
            ("with each step's own times", f"{100 * self.measured.replayed:+.1f} %"),
            ("bubble, measured / simulated", f"{100 * measured.bubble:.1f} / {100 * simulated.bubble:.1f} %"),
            (f"a step's computations, busiest rank ({slowest.rank})", span(busy, seconds=True)),
        ]


def report(folder: Path, out: Path | None = None) -> None:
    """Print what is known of a run, and write it as a page.

    Args:
        folder: of the run.
        out: the file; a figure or a trace shows the timelines alone. None for ``report.html`` in the folder.

    Raises:
        UsageError: no run, nothing logged yet, a file that cannot be written, or timelines asked for that were not
            recorded.
    """
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is no run folder: it has no {RUN_FILE}.")
    out = out or folder / PAGE
    check_name(out)
    config, metrics, profile = load_config(folder / RUN_FILE), read_metrics(folder), read_profile(folder)
    if not metrics:
        raise UsageError(f"{folder}: nothing has been logged yet.\n  Wait for the first step.")
    if profile is None and out.suffix != ".html":
        raise UsageError(f"{out}: a figure or a trace needs timelines.\n  {NO_PROFILE}")
    compared = Comparison.of(MeasuredStep.of(profile)) if profile else None
    console = Console(highlight=False)
    _print(console, folder, config, metrics, compared)
    if out.suffix == ".html":
        out.write_text(html(folder, config, metrics, compared), encoding="utf-8")
    elif compared:
        write(out, compared.charts, title=folder.name, lead="")
    console.print(Text(f"written: {out}"), soft_wrap=True)


# ---- what is said ---------------------------------------------------------------------------------------------------


def run_facts(config: RunConfig, metrics: Sequence[StepMetrics]) -> list[tuple[str, str]]:
    """A run in numbers, as (name, value)."""
    last = metrics[-1]
    validation = next((m.validation_loss for m in reversed(metrics) if m.validation_loss is not None), None)
    facts = [("steps done", f"{last.step} of {last.steps}"), ("loss", f"{last.loss:.4f}")]
    if validation is not None:
        facts.append(("validation loss", f"{validation:.4f}"))
    rates = [m.tokens_per_second for m in metrics[1:] or metrics]
    facts.append(("tokens per second (median)", f"{median(rates):,.0f}"))
    if last.mfu is not None:
        facts.append(("model FLOPs utilisation", f"{100 * last.mfu:.1f} %"))
    return [*facts, ("peak memory of a rank", amount(max(m.memory_bytes for m in metrics)))]


def op_table(measured: MeasuredStep) -> list[list[str]]:
    """Headings, then a row for each op and stage."""
    rows = [["action", "stage", "recorded", "median", "mean", "longest"]]
    for op, stage, count, *times in measured.by_op():
        lengths = (span(time, seconds=True) for time in times)
        rows.append([NAMES[op], str(stage) if stage >= 0 else "–", f"{count:,}", *lengths])
    return rows


def rank_table(measured: MeasuredStep, most: int = 64) -> list[list[str]]:
    """Headings, then a row for each rank, of many those that compute longest."""
    found = sorted(measured.by_rank(), key=lambda entry: -entry[1])
    shown = sorted(found[:most], key=lambda entry: entry[0].rank)
    rows = [["rank", "pp", "dp", "tp", "computing a step", "waiting for messages", "idle share of the step"]]
    for rank, busy, waiting in shown:
        numbers = (str(n) for n in (rank.rank, rank.pp, rank.dp, rank.tp))
        share = 1 - busy / measured.step_time
        rows.append([*numbers, span(busy, seconds=True), span(waiting, seconds=True), f"{100 * share:.1f} %"])
    return rows


def _print(
    console: Console, folder: Path, config: RunConfig, metrics: Sequence[StepMetrics], compared: Comparison | None
) -> None:
    console.print(Text(f"{folder.name}: {config.model.name}, {config.parallel.describe()}", style="bold"))
    events = read_events(folder)
    _print_facts(console, run_facts(config, metrics) + effective_facts(events))
    if len(happened := event_table(events)) > 1:
        console.print()
        _print_table(console, happened)
    if compared is None:
        console.print(Text(NO_PROFILE, style="yellow"))
        return
    console.print()
    show(console, compared.charts)
    console.print()
    for table in (op_table(compared.measured), rank_table(compared.measured, 16)):
        _print_table(console, table)
        console.print()
    _print_facts(console, compared.facts())


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


# ---- the page -------------------------------------------------------------------------------------------------------


def html(folder: Path, config: RunConfig, metrics: Sequence[StepMetrics], compared: Comparison | None) -> str:
    """The page of a run."""
    lead = f"{config.model.name}, {config.parallel.describe()}, {config.train.precision}."
    events = read_events(folder)
    parts = [_tiles(run_facts(config, metrics) + effective_facts(events)), curves(metrics)]
    if len(happened := event_table(events)) > 1:
        parts += [Fragment("<h2>What happened</h2>"), _table(happened)]
    if recorded := read_histograms(folder):
        parts.append(histograms(*recorded))
    if compared:
        parts += [
            Fragment("<h2>One step: measured under simulated</h2>"),
            _tiles(compared.facts()),
            Fragment(f"<p class=note>{escape(HOW)}</p>"),
            comparison(compared.charts, mark=False),
            timelines(compared.charts),
            HELP,
            Fragment("<h2>Times of the actions</h2>"),
            _table(op_table(compared.measured)),
            Fragment("<h2>The ranks</h2>"),
            _table(rank_table(compared.measured)),
        ]
    else:
        parts.append(Fragment(f"<h2>One step</h2><p>{escape(NO_PROFILE)}</p>"))
    return page(folder.name, lead, parts)


HOW = (
    "The simulation plays the same program with the mean of the recorded times of each op and stage, and with the "
    "median time of the messages that were waited for. What it does not know is how times vary: played with each "
    "step's own times, only what the simulation itself leaves out remains."
)


def _tiles(facts: Sequence[tuple[str, str]]) -> Fragment:
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts)
    return Fragment(f'<div class="answer">{tiles}</div>')


def _table(rows: list[list[str]]) -> Fragment:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return Fragment(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
