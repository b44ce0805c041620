"""Text report and figure of goodput forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.base.units import DAY, HOUR
from shoal.planning.goodput import (
    GoodputForecast,
    TrainingJob,
    best_interval,
    effective,
    productive_share,
    simulate_failures,
)
from shoal.report.charts import draw_lines, new_figure, to_svg
from shoal.report.tables import table_lines

TITLES = ("devices", "fails every", "save every", "Young", "Daly", "effective", "simulated", "spares", "nodes there",
          "goodput")  # fmt: skip


def goodput_lines(forecasts: Sequence[GoodputForecast]) -> list[str]:
    """Return the lines that `shoal goodput` prints: one row per number of devices."""
    rows = []
    for found in forecasts:
        job = found.job
        spares = f"{job.spares} node{'s' * (job.spares != 1)}"
        rows.append((
            f"{job.devices:,}", show_time(job.between), show_time(found.interval),
            show_time(found.young), show_time(found.daly), f"{100 * found.effective:.1f} %",
            f"{100 * found.simulated:.1f} %", f"{spares}, +{100 * job.spare_share:.1f} %",
            f"{100 * found.available:.1f} %", f"{100 * found.goodput:.1f} %",
        ))  # fmt: skip
    first = forecasts[0].job
    return [
        f"a device fails every {first.mtbf / HOUR:,.0f} hours; a save stops training for "
        f"{show_time(first.checkpoint)}"
        + (f" and is written {show_time(first.flush)} later" if first.flush else "")
        + f", a restart takes {show_time(first.restart)}, a repair {show_time(first.repair)}",
        "", *table_lines(TITLES, rows, right=0),
    ]


def show_time(seconds: float) -> str:
    """Format seconds in a common unit.

    >>> show_time(90), show_time(5400), show_time(200000)
    ('90 s', '90 min', '2.31 d')
    """
    for unit, size, least in (("d", DAY, DAY), ("h", HOUR, 3 * HOUR), ("min", 60.0, 120.0)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def goodput_figure(kinds: Mapping[str, Sequence[TrainingJob]], seed: int = 0) -> str:
    """Draw the goodput over the interval, with simulated points and the optimum, and over the devices.

    Args:
        kinds: jobs by the name of their restart; with several, the second chart compares them.
    """
    jobs = next(iter(kinds.values()))
    span = [float(t) for t in np.geomspace(30, 6 * HOUR, 60)]
    curves = {f"{job.devices:,} devices": [(t, 100 * effective(job, t)) for t in span] for job in jobs}
    simulated = {
        f"{job.devices:,} simulated":
        [(t, 100 * simulate_failures(replace(job, spares=None), t, failures=2000, seed=seed)) for t in span[::3]]
        for job in jobs
    }
    marks = [(best_interval(job), 100 * effective(job, best_interval(job)), "best") for job in jobs]
    figure, (above, below) = new_figure(760, 720, rows=2, title="Goodput")
    draw_lines(
        above, "Time that counts, by the work between saves", curves | simulated, marks=marks,
        from_zero=True, dashed=frozenset(simulated), y=("", lambda y: f"{y:.0f} %"),
        x=("work between saves, seconds (log scale)", lambda x: f"{x:,.0f}"),
    )  # fmt: skip
    counts = np.geomspace(1000, 100_000, 25)
    costs = {name: (of[0].checkpoint, of[0].restart) for name, of in kinds.items()} if len(kinds) > 1 else {
        "save 5 s, restart 2 min": (5.0, 120.0), "save 30 s, restart 5 min": (30.0, 300.0),
        "save 2 min, restart 15 min": (120.0, 900.0),
    }  # fmt: skip
    sizes = {
        name: [(float(n), 100 * productive_share(TrainingJob(int(n), jobs[0].mtbf, *each))) for n in counts]
        for name, each in costs.items()
    }
    draw_lines(
        below, "Time that counts at the best interval, by devices", sizes, from_zero=True,
        x=("devices (log scale)", lambda n: f"{n:,.0f}"), y=("", lambda y: f"{y:.0f} %"),
    )  # fmt: skip
    return to_svg(figure)
