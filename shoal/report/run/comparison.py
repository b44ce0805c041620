"""A recorded step compared with its simulation, and tables of the recorded times."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.units import show_seconds
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.measured import MeasuredStep
from shoal.report.timeline.palette import NAMES


@dataclass(frozen=True)
class Comparison:
    """A measured step and the simulated one.

    Attributes:
        measured: the recorded steps.
        charts: the simulated step, then the typical measured one.
    """

    measured: MeasuredStep
    charts: tuple[Chart, Chart]

    @staticmethod
    def simulate(measured: MeasuredStep) -> Comparison:
        """Simulate the program with the measured times."""
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
        """Relative difference of the predicted step time from the mean measured one."""
        return self.predicted / self.measured.step_time - 1

    def facts(self) -> list[tuple[str, str]]:
        """Return the comparison in numbers, as (name, value)."""
        simulated, measured = (chart.timeline for chart in self.charts)
        slowest, busy, _ = max(self.measured.by_rank(), key=lambda entry: entry[1])
        steps = len(self.measured.step_times)
        return [
            (f"measured step (mean of {steps})", show_seconds(self.measured.step_time)),
            ("simulated step", show_seconds(self.predicted)),
            ("difference", f"{100 * self.difference:+.1f} %"),
            ("with each step's own times", f"{100 * self.measured.replayed:+.1f} %"),
            ("bubble, measured / simulated", f"{100 * measured.bubble:.1f} / {100 * simulated.bubble:.1f} %"),
            (f"a step's computations, busiest rank ({slowest.rank})", show_seconds(busy)),
        ]


def op_table(measured: MeasuredStep) -> list[list[str]]:
    """Return the headings, then a row for each op and stage."""
    rows = [["action", "stage", "recorded", "median", "mean", "longest"]]
    for op, stage, count, *times in measured.by_op():
        lengths = (show_seconds(time) for time in times)
        rows.append([NAMES[op], str(stage) if stage >= 0 else "–", f"{count:,}", *lengths])
    return rows


def rank_table(measured: MeasuredStep, most: int = 64) -> list[list[str]]:
    """Return the headings, then a row for each rank; at most the ``most`` ranks that compute longest."""
    found = sorted(measured.by_rank(), key=lambda entry: -entry[1])
    shown = sorted(found[:most], key=lambda entry: entry[0].rank)
    rows = [["rank", "pp", "dp", "tp", "computing a step", "waiting for messages", "idle share of the step"]]
    for rank, busy, waiting in shown:
        numbers = (str(n) for n in (rank.rank, rank.pp, rank.dp, rank.tp))
        share = 1 - busy / measured.step_time
        rows.append([*numbers, show_seconds(busy), show_seconds(waiting), f"{100 * share:.1f} %"])
    return rows
