"""Charts: timelines with the colours, memory curves and table entries needed to draw them.

Simulated and measured steps are both a `Timeline`, so every drawing accepts either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from shoal.base.units import show_bytes, show_seconds
from shoal.pipeline.simulator.columns import COMPUTING, FORWARD, OPS
from shoal.pipeline.simulator.timeline import Timeline
from shoal.report.timeline.palette import NAMES, SHADES, Paint


@dataclass(frozen=True)
class Chart:
    """A named timeline with display data."""

    name: str
    timeline: Timeline
    kind: int = 0  # kind of replicas to show
    seconds: bool = True  # True if times are in seconds; otherwise they are in units of the forward's time
    # bytes that a micro-batch's forward saves on a stage, a number or [stages]; None counts activations
    activation: float | np.ndarray | None = None
    # bytes of these that remain between the two halves of its backward; None for all
    kept_for_weight: float | np.ndarray | None = None
    message_bytes: float | None = None  # bytes of one message between two stages; None if unknown
    facts: dict[str, str] = field(default_factory=dict)  # extra columns of the table, by title
    lane: str = "rank"  # name of a lane before its number; "pp" where other ranks have the same place in the pipeline

    @property
    def start(self) -> np.ndarray:
        return self.timeline.start[self.kind]

    @property
    def end(self) -> np.ndarray:
        return self.timeline.end[self.kind]

    @cached_property
    def paints(self) -> list[Paint]:
        """Paints in use, in the order of a legend."""
        return self._painted[0]

    @cached_property
    def paint(self) -> np.ndarray:
        """[rows] Index of each action's paint."""
        return self._painted[1]

    @cached_property
    def _painted(self) -> tuple[list[Paint], np.ndarray]:
        columns, program = self.timeline.columns, self.timeline.columns.program
        copy, shade = np.zeros(program.stages + 1, int), np.zeros(program.stages + 1, int)  # last: no stage
        for rank in range(columns.ranks):
            held = program.rank_stages(rank)
            for stage in held:
                beside = [s for s in held if s // program.depth == stage // program.depth]
                copy[stage] = stage // program.depth % 2
                shade[stage] = round(beside.index(stage) * (SHADES - 1) / max(1, len(beside) - 1))
        codes = np.stack((columns.op.astype(int), copy[columns.stage], shade[columns.stage]))
        codes[1:, columns.op > COMPUTING] = 0
        found, paint = np.unique(codes, axis=1, return_inverse=True)
        return [Paint(OPS[op], int(c), int(s)) for op, c, s in found.T.tolist()], paint.ravel()

    @cached_property
    def half(self) -> np.ndarray:
        """[rows] 1 and 2 for the upper and the lower of two actions that run together, else 0."""
        half = np.zeros(self.timeline.columns.rows, int)
        half[self.timeline.pairs], half[self.timeline.pairs + 1] = 1, 2
        return half

    @cached_property
    def live(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each pipeline rank, sorted times and the bytes (or activations) alive from each time on.

        Counts like `Columns.peak_bytes`: from the start of a forward to the end of the action that frees its
        activation.
        """
        columns = self.timeline.columns
        change = columns.activation_changes(*self._bytes)
        at = np.where(columns.op == FORWARD, self.start, self.end)
        series = []
        for begin, end in pairwise(columns.offset):
            rows = begin + np.flatnonzero(change[begin:end])  # in the rank's order, which is sorted by time
            series.append((at[rows], np.cumsum(change[rows])))
        return series

    @cached_property
    def peak(self) -> np.ndarray:
        """[ranks] Maximum bytes (or activations) alive together."""
        return self.timeline.columns.peak_bytes(*self._bytes)

    @property
    def _bytes(self) -> tuple[float | np.ndarray, float | np.ndarray | None]:
        """Return what a micro-batch keeps after its forward, and between the halves of its backward."""
        return 1.0 if self.activation is None else self.activation, self.kept_for_weight

    def caption(self) -> str:
        """Return the step time, bubble and peak of live activations in a line."""
        row = self.summary()
        return f"{row['step']}, bubble {row['bubble']}, at most {row['peak live activations']} alive"

    def summary(self) -> dict[str, str]:
        """Return the table's row: step time, bubble, memory, communication, weight versions, then `facts`."""
        timeline = self.timeline
        sent = np.bincount(timeline.messages.source, minlength=timeline.ranks)
        time = timeline.step_time
        row = {
            "step": show_seconds(time) if self.seconds else f"{time:.4g} T",
            "bubble": f"{100 * timeline.bubble:.1f} %",
            "peak live activations": f"{timeline.peak_live.max():.3g}",
        }
        if self.activation is not None:
            row["peak activation memory"] = show_bytes(self.peak.max(initial=0.0))
        row["messages"] = f"{sent.sum():,}"
        if self.message_bytes is not None:
            row["sent per rank, at most"] = show_bytes(sent.max(initial=0) * self.message_bytes)
        row["weight versions"] = str(timeline.weight_versions.max())
        return row | self.facts


def table(charts: Sequence[Chart]) -> tuple[list[str], list[list[str]]]:
    """Return a heading for each column and a row for each chart; unknown values are a dash."""
    rows = [{"": chart.name, **chart.summary()} for chart in charts]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    if all(row.get("weight versions") == "1" for row in rows):
        headings.remove("weight versions")
    return headings, [[row.get(heading, "–") for heading in headings] for row in rows]


def legend(charts: Sequence[Chart]) -> list[tuple[Paint, str]]:
    """Return the paints visible in several charts, each with its meaning; for shades, only the first."""
    order = list(NAMES)
    seen = {chart.paints[i] for chart in charts for i in np.unique(chart.paint[chart.end > chart.start])}
    first: dict[str, Paint] = {}
    for paint in sorted(seen, key=lambda p: (p.copy, order.index(p.op), p.shade)):
        first.setdefault(paint.name, paint)
    return [(paint, name) for name, paint in first.items()]


def has_shades(charts: Sequence[Chart]) -> bool:
    """Return whether some rank has several stages of one copy of the model."""
    return any(paint.shade for chart in charts for paint in chart.paints)


# ---- axes ----------------------------------------------------------------------------------------------------------


def axis(end: float, most: int, *, seconds: bool) -> tuple[str, list[tuple[float, str]]]:
    """Return a time axis from 0: its unit, and at most ``most`` round numbers with their relative positions.

    The numbers are spaced by 1, 2 or 5 times a power of ten.
    """
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if seconds else ((1.0, "T"),)
    factor, unit = next((each for each in units if end * each[0] >= 1), units[-1])
    span, most = end * factor, max(2, most)
    if not span:
        return unit, [(0.0, "0")]
    step = 10.0 ** np.floor(np.log10(span / most))
    step = next(step * k for k in (1, 2, 5, 10) if span / (step * k) <= most)
    marks = [k * step for k in range(int(span / step + 1e-9) + 1)]
    return unit, [(mark / span, f"{mark:.6g}") for mark in marks]
