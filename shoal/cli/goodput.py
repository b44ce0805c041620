"""`shoal goodput`: how much of a long training counts, how often to save, how many spares to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_place
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import TIME, parse, show_seconds
from shoal.planning.goodput.model import (
    DAY,
    HOUR,
    LLAMA_3,
    TrainingJob,
    available,
    best_interval,
    daly,
    device_mtbf,
    effective,
    goodput,
    play,
    spares_for,
    young,
)
from shoal.report.lines import lines as chart
from shoal.report.svg import Canvas

UNITS = TIME | {"min": 60.0, "h": HOUR, "d": DAY}


class GoodputOptions(Section):
    devices: str = "1024,4096,16384,100000"
    """That a job needs, with commas."""

    mtbf: PositiveFloat | None = None
    """Hours between failures of one device (default: 50,677, as in 54 days of Llama 3)."""

    checkpoint: str = "30s"
    """That training stops for a save: 30s, 2min."""

    flush: str = "0s"
    """That a save is then written for in the background: until it is, a failure loses the interval before as well."""

    restart: str = "5min"
    """From a failure until training goes on, without what is done again."""

    interval: str | None = None
    """Of work between saves (default: the best)."""

    per_node: PositiveInt = 8
    """Devices that fall out together."""

    spares: NonNegativeInt | None = None
    """Nodes that stand by (default: as many as --availability needs)."""

    repair: str = "1d"
    """Until a failed node is back."""

    availability: float = Field(0.99, gt=0, lt=1)
    """Of enough whole nodes, for which spares are counted."""

    failures: PositiveInt = 20000
    """Of each simulation."""

    seed: NonNegativeInt = 0
    """Of the simulation."""

    out: Path | None = None
    """Write a figure (.svg)."""


def run(options: GoodputOptions) -> int:
    """Compute, simulate, print and draw; the exit code.

    Raises:
        UsageError: no numbers, or a save that takes longer than the job lives.
    """
    if options.out and options.out.suffix != ".svg":
        raise UsageError(f"--out {options.out}: a figure ends in .svg")
    check_place(options.out, "--out")
    if options.spares is not None:
        reject_unused(options, ("availability",), "--spares says how many there are")
    jobs = described(options)
    console = Console(highlight=False)
    for line in report(jobs, options):
        console.print(Text(line), soft_wrap=True)
    if options.out:
        options.out.write_text(figure(jobs, options), encoding="utf-8")
        console.print(Text(f"written: {options.out}"), soft_wrap=True)
    return 0


def described(options: GoodputOptions) -> list[TrainingJob]:
    """The jobs that the options describe, with their spares."""
    try:
        devices = [int(number) for number in options.devices.split(",")]
    except ValueError:
        raise UsageError(f"--devices {options.devices}: give numbers, as 1024,16384") from None
    if min(devices) < 1:
        raise UsageError(f"--devices {options.devices}: a job needs at least one")
    times = {
        name: parse(getattr(options, name), UNITS, where=f"--{name}")
        for name in ("checkpoint", "flush", "restart", "repair")
    }
    if not times["checkpoint"]:
        raise UsageError("--checkpoint 0s: a save that costs nothing would be made all the time.\n  Give its cost.")
    if options.interval and parse(options.interval, UNITS, where="--interval") < times["flush"]:
        raise UsageError(
            f"--flush {options.flush}: longer than --interval {options.interval}; a save would not be written when the "
            "next begins.\n  Save less often."
        )
    mtbf = options.mtbf * HOUR if options.mtbf else device_mtbf(**LLAMA_3)
    jobs = []
    for count in devices:
        job = TrainingJob(count, mtbf, per_node=options.per_node, spares=options.spares, **times)
        if (alone := job.restart + job.checkpoint + job.flush) > 20 * job.between:
            raise UsageError(
                f"--devices {count}: it fails every {show_seconds(job.between)}, and a restart and a save take "
                f"{show_seconds(alone)}: it would never get on."
                "\n  Give fewer devices, or faster ones of both."
            )
        jobs.append(job if job.spares is not None else replace(job, spares=spares_for(job, options.availability)))
    return jobs


def report(jobs: Sequence[TrainingJob], options: GoodputOptions) -> list[str]:
    """All that is printed."""
    rows = [("devices", "fails every", "save every", "Young", "Daly", "effective", "simulated", "spares", "nodes there",
             "goodput")]  # fmt: skip
    for job in jobs:
        interval = _interval(job, options)
        alone = replace(job, spares=None)
        rows.append((
            f"{job.devices:,}", show_seconds_long(job.between), show_seconds_long(interval),
            show_seconds_long(young(job)), show_seconds_long(daly(job)), f"{100 * effective(job, interval):.1f} %",
            f"{100 * play(alone, interval, failures=options.failures, seed=options.seed):.1f} %",
            f"{job.spares} nodes, +{100 * job.spare_share:.1f} %", f"{100 * available(job):.1f} %",
            f"{100 * goodput(job, interval):.1f} %",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first = jobs[0]
    return [
        f"a device fails every {first.mtbf / HOUR:,.0f} hours; a save stops training for "
        f"{show_seconds_long(first.checkpoint)}"
        + (f" and is written {show_seconds_long(first.flush)} later" if first.flush else "")
        + f", a restart takes {show_seconds_long(first.restart)}, a repair {show_seconds_long(first.repair)}",
        "", *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows),
    ]


def _interval(job: TrainingJob, options: GoodputOptions) -> float:
    return parse(options.interval, UNITS, where="--interval") if options.interval else best_interval(job)


def show_seconds_long(seconds: float) -> str:
    """In the unit that people would take.

    >>> show_seconds_long(90), show_seconds_long(5400), show_seconds_long(200000)
    ('90 s', '90 min', '2.31 d')
    """
    for unit, size, least in (("d", DAY, DAY), ("h", HOUR, 3 * HOUR), ("min", 60.0, 120.0)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def figure(jobs: Sequence[TrainingJob], options: GoodputOptions) -> str:
    """Effective time over the interval, with the simulation's points and the best; goodput over the devices."""
    span = np.geomspace(30, 6 * HOUR, 60)
    curves = {f"{job.devices:,} devices": [(float(t), 100 * effective(job, t)) for t in span] for job in jobs}
    marks = [(best_interval(job), 100 * effective(job, best_interval(job)), "best") for job in jobs]
    curves = {name: [(x, max(y, 0.1)) for x, y in points] for name, points in curves.items()}
    for job in jobs:  # the simulation, over the curves
        chosen = span[::3]
        alone = replace(job, spares=None)
        points = [(float(t), 100 * play(alone, t, failures=2000, seed=options.seed)) for t in chosen]
        curves[f"{job.devices:,} simulated"] = [(x, max(y, 0.1)) for x, y in points]
    names = frozenset(name for name in curves if name.endswith("simulated"))
    left = chart(
        "Time that counts, by the work between saves", curves, width=640, height=330, marks=marks, from_zero=True,
        dashed=names, x=("work between saves, seconds (log scale)", lambda x: f"{x:,.0f}"),
        y=("", lambda y: f"{y:.0f} %"),
    )  # fmt: skip
    counts = np.geomspace(1000, 100_000, 25)
    kinds = {
        "save 5 s, restart 2 min": (5.0, 120.0), "save 30 s, restart 5 min": (30.0, 300.0),
        "save 2 min, restart 15 min": (120.0, 900.0),
    }  # fmt: skip
    sizes = {
        name: [(float(n), 100 * goodput(TrainingJob(int(n), jobs[0].mtbf, save, restart))) for n in counts]
        for name, (save, restart) in kinds.items()
    }
    right = chart(
        "Time that counts at the best interval, by devices", sizes, width=640, height=330, from_zero=True,
        x=("devices (log scale)", lambda n: f"{n:,.0f}"), y=("", lambda y: f"{y:.0f} %"),
    )  # fmt: skip
    canvas = Canvas()
    canvas.place(10, 10, left)
    canvas.place(10, 370, right)
    return canvas.document(700, 720, "Goodput")
