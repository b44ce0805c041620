"""`shoal goodput`: predict the effective training time under failures, the best save interval and the spares needed."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable, write_atomically
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.terminal import wrap_lines
from shoal.base.units import HOUR, parse_counts
from shoal.report.planning.goodput_report import goodput_figure, goodput_lines


class GoodputOptions(Section):
    devices: str = "1024,4096,16384,100000"
    """Comma-separated numbers of devices that a job needs."""

    mtbf: PositiveFloat | None = None
    """Hours between failures of one device (default: 50,677, as in 54 days of Llama 3)."""

    checkpoint: str = "30s"
    """Time for which training stops during a save: 30s, 2min."""

    flush: str = "0s"
    """Time to write the save in the background afterwards; a failure meanwhile also loses the interval before it."""

    restart: str = "5min"
    """Time from a failure until training continues, without the repeated work; several to compare, with or without
    names: in process=30s,all ranks=5min. `shoal bench failover` measures them."""

    interval: str | None = None
    """Time between saves (default: the best)."""

    per_node: PositiveInt = 8
    """Devices that fail together."""

    spares: NonNegativeInt | None = None
    """Number of spare nodes (default: as many as --availability needs)."""

    repair: str = "1d"
    """Time to repair a failed node."""

    availability: float = Field(0.99, gt=0, lt=1)
    """Required probability of enough working nodes; determines the spares."""

    failures: PositiveInt = 20000
    """Failures in each simulation."""

    seed: NonNegativeInt = 0
    """Random seed of the simulation."""

    out: Path | None = None
    """Write a figure (.svg)."""


def split_restart(text: str) -> tuple[str, str]:
    """Return the name and the time of ``NAME=TIME``; a time alone is its own name.

    >>> split_restart("in process=30s"), split_restart("5min")
    (('in process', '30s'), ('restart 5min', '5min'))
    """
    name, named, time = text.strip().rpartition("=")
    return (name.strip() if named else f"restart {time}"), time.strip()


def run(options: GoodputOptions) -> int:
    """Compute, simulate, print and draw; return the exit code."""
    check_writable(options.out, "--out", ".svg")
    if options.spares is not None:
        reject_unused(options, ("availability",), "--spares gives their number")
    kinds = dict(split_restart(part) for part in options.restart.split(","))
    given = options.model_dump(exclude={"devices", "restart", "out"})
    given["mtbf"] = options.mtbf and options.mtbf * HOUR
    counts = parse_counts(options.devices, where="--devices")
    forecasts = {
        name: [shoal.goodput(devices, restart=restart, **given) for devices in counts]
        for name, restart in kinds.items()
    }
    print("\n\n".join("\n".join(wrap_lines(goodput_lines(found))) for found in forecasts.values()))
    if options.out:
        jobs = {name: [forecast.job for forecast in found] for name, found in forecasts.items()}
        write_atomically(options.out, goodput_figure(jobs, options.seed))
        print(f"written: {options.out}")
    return 0
