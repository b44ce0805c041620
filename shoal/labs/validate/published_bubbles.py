"""Compare simulated bubbles with those that the zero-bubble paper printed.

Qi et al. 2024, table 5, has bubble rates that the authors computed from profiled times (table 6). The simulator gets
the same times, ranks and micro-batches; nothing is fitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import read_csv
from shoal.pipeline.simulator.compare import compare_schedules
from shoal.pipeline.simulator.timeline import Timeline
from shoal.report.tables import table_lines

FILE = "zero_bubble.csv"
NAMES = {
    "1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-1p": "zb-1p",
    "ZB-2p": "zb-2p",
}  # fmt: skip
NOTE = re.compile(r"bubble rate \(Table 5\)=([\d.]+); profiled TF/TB/TW/Tcomm ms=([\d.]+)/([\d.]+)/([\d.]+)/([\d.]+)")


@dataclass(frozen=True)
class PrintedBubble:
    """One printed bubble rate."""

    row: str  # id of the row
    method: str  # the paper's name of the schedule
    ranks: int
    microbatches: int
    virtual: int  # stages of a rank
    times: tuple[float, ...]  # T_F, T_B, T_W of all stages of a rank and T_comm of a message [ms]
    bubble: float  # the printed rate of the slowest rank
    kept: float = 1.0  # M_W / M_B, the part of the activations that is live between the halves of a backward


def read_printed(folder: Path) -> list[PrintedBubble]:
    """Read the rows with a printed bubble rate from the folder's table.

    Raises:
        UsageError: the table or such a row is missing.
    """
    file = folder / FILE
    if not file.is_file():
        raise UsageError(f"{folder} has no {FILE}, the table of printed bubble rates")
    try:
        printed = [_parse(row, match) for row in read_csv(file) if (match := NOTE.search(row["note"]))]
    except (ValueError, LookupError) as error:
        raise UsageError(f"{file}: a row cannot be read: {type(error).__name__}: {error}") from None
    if not printed:
        raise UsageError(f"{file}: no row has a printed bubble rate with its times")
    return printed


def _parse(row: dict[str, str], match: re.Match) -> PrintedBubble:
    bubble, *times = map(float, match.groups())
    ranks, microbatches, virtual = (int(row[name]) for name in ("pp", "num_microbatches", "vpp"))
    kept = compute_kept(*(int(row[name]) for name in ("seq", "hidden", "heads")))
    return PrintedBubble(row["row_id"], row["schedule"], ranks, microbatches, virtual, tuple(times), bubble, kept)


def compute_kept(seq: int, hidden: int, heads: int) -> float:
    """Return M_W / M_B of a transformer layer that stores its attention scores (Qi et al., table 1)."""
    return 32 / (34 + 5 * heads * seq / hidden)


def simulate_printed(printed: PrintedBubble) -> Timeline:
    """Simulate the same step; raise a `UsageError` if the method is unknown."""
    if printed.method not in NAMES:
        raise UsageError(f"{printed.row}: method {printed.method}; known are {', '.join(NAMES)}")
    forward, backward_input, backward_weight, message = printed.times
    [played] = compare_schedules(
        [NAMES[printed.method]], pp=printed.ranks, microbatches=printed.microbatches,
        virtual_stages=printed.virtual if printed.method == "1F1B-I" else None, forward=forward,
        backward_input=backward_input, backward_weight=backward_weight, comm=message, kept_for_weight=printed.kept,
    )
    return played.timeline


def compare_printed(printed: Iterable[PrintedBubble]) -> tuple[list[str], float]:
    """Return a table of all rows, and the mean absolute error in percentage points of the step."""
    rows, errors = [], []
    for row in printed:
        bubble = simulate_printed(row).bubble_of_slowest_rank
        errors.append(100 * (bubble - row.bubble))
        sizes = f"{row.ranks}", f"{row.microbatches}", f"{row.virtual}"
        rates = f"{100 * row.bubble:.2f} %", f"{100 * bubble:.2f} %", f"{errors[-1]:+.2f}"
        rows.append((row.row, row.method, *sizes, *rates))
    head = ("row", "method", "p", "m", "v", "printed", "simulated", "error")
    return table_lines(head, rows, right=2), sum(map(abs, errors)) / len(errors)
