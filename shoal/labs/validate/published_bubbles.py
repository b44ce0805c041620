"""The bubbles that the zero-bubble paper printed, beside those that the simulator finds for the same times.

Qi et al. 2024, table 5, holds bubble rates that the authors computed from times that they had profiled (table 6).
Nothing here is fitted: the times, the number of ranks and micro-batches go in, the bubble comes out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.pipeline import program as pipeline
from shoal.pipeline.program import Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.placement import looped
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes
from shoal.report.tables import table_lines

FILE = "zero_bubble.csv"
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
AUTOMATIC = {"ZB-1p": 1, "ZB-2p": 2}  # times the memory of 1F1B
NOTE = re.compile(r"bubble rate \(Table 5\)=([\d.]+); profiled TF/TB/TW/Tcomm ms=([\d.]+)/([\d.]+)/([\d.]+)/([\d.]+)")


@dataclass(frozen=True)
class Printed:
    """One printed bubble rate.

    Attributes:
        row: where it is from.
        method: the paper's name of the schedule.
        ranks, microbatches, virtual: sizes; `virtual` stages on each rank.
        times: T_F, T_B, T_W of a rank's whole part of the model and T_comm of a message [ms].
        bubble: the rate printed, of the slowest rank.
        kept: M_W / M_B, what is still alive between the halves of a backward.
    """

    row: str
    method: str
    ranks: int
    microbatches: int
    virtual: int
    times: tuple[float, ...]
    bubble: float
    kept: float = 1.0


def read(folder: Path) -> list[Printed]:
    """Those rows of the table of published measurements that have a printed bubble rate.

    Raises:
        UsageError: the folder has no such table, or it has no such row.
    """
    file = folder / FILE
    if not file.is_file():
        raise UsageError(f"{folder} has no {FILE}, the table of printed bubble rates")
    with file.open(newline="") as lines:
        printed = [_printed(row, match) for row in csv.DictReader(lines) if (match := NOTE.search(row["note"]))]
    if not printed:
        raise UsageError(f"{file}: no row has a printed bubble rate with its times")
    return printed


def _printed(row: dict[str, str], match: re.Match) -> Printed:
    bubble, *times = map(float, match.groups())
    ranks, microbatches, virtual = (int(row[name]) for name in ("pp", "num_microbatches", "vpp"))
    kept = kept_for_weight(*(int(row[name]) for name in ("seq", "hidden", "heads")))
    return Printed(row["row_id"], row["schedule"], ranks, microbatches, virtual, tuple(times), bubble, kept)


def kept_for_weight(seq: int, hidden: int, heads: int) -> float:
    """M_W / M_B of a transformer layer that stores its attention scores: 32 / (34 + 5 a s / h) (Qi et al., table 1)."""
    return 32 / (34 + 5 * heads * seq / hidden)


def played(printed: Printed) -> Timeline:
    """The same step, simulated.

    Raises:
        UsageError: the method is none that is known.
    """
    forward, backward_input, backward_weight, message = printed.times
    v = printed.virtual
    times = ActionTimes(forward / v, backward_input / v, backward_weight / v)
    return simulate(_program(printed), times, MessageTimes(time=message))


def _program(printed: Printed) -> Program:
    p, m = printed.ranks, printed.microbatches
    if printed.method in NAMES:
        schedule = SCHEDULES[NAMES[printed.method]]
        return pipeline.build_program(schedule, p, m, virtual_stages=printed.virtual, transfers=False)
    if printed.method not in AUTOMATIC:
        raise UsageError(f"{printed.row}: method {printed.method}; known are {', '.join((*NAMES, *AUTOMATIC))}")
    orders = zb_auto(
        p, m, pipeline.StageDurations(*printed.times), memory=AUTOMATIC[printed.method] * p, kept=printed.kept
    )
    return Program(tuple(map(tuple, orders)), looped(p, 1), m)


def compare(printed: Iterable[Printed]) -> tuple[list[str], float]:
    """Lines that compare row by row, and the mean absolute error in points (hundredths of the step)."""
    rows, errors = [], []
    for row in printed:
        bubble = played(row).bubble_of_slowest_rank
        errors.append(100 * (bubble - row.bubble))
        sizes = f"{row.ranks}", f"{row.microbatches}", f"{row.virtual}"
        rates = f"{100 * row.bubble:.2f} %", f"{100 * bubble:.2f} %", f"{errors[-1]:+.2f}"
        rows.append((row.row, row.method, *sizes, *rates))
    head = ("row", "method", "p", "m", "v", "printed", "simulated", "error")
    return table_lines(head, rows, right=2), sum(map(abs, errors)) / len(errors)
