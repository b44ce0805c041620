"""A timeline ready to be drawn: what colour each action has, what is alive when, what is said beside it.

Simulated and measured steps are both a `Timeline`, so every drawing takes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shoal.pipeline.program import Op
from shoal.pipeline.simulator.columns import BACKWARD, FORWARD, INPUT, OPS, WEIGHT
from shoal.pipeline.simulator.timeline import Timeline
from shoal.report.timeline.palette import NAMES, SHADES, Paint


@dataclass(frozen=True)
class Chart:
    """One timeline and its name.

    Attributes:
        name: its title.
        timeline: what happened when.
        kind: of the replicas that it shows.
        seconds: whether its times are seconds; else they are in units of the forward's.
        activation: bytes that a micro-batch's forward leaves on a stage, a number or [stages]; None counts activations.
        kept_for_weight: of them, what stays between the two halves of its backward; None for all.
        message_bytes: of one message between two stages; None where not known.
        facts: more columns of the table beside it, by their title.
    """

    name: str
    timeline: Timeline
    kind: int = 0
    seconds: bool = True
    activation: float | np.ndarray | None = None
    kept_for_weight: float | np.ndarray | None = None
    message_bytes: float | None = None
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def start(self) -> np.ndarray:
        """[rows] when each action begins."""
        return self.timeline.start[self.kind]

    @property
    def end(self) -> np.ndarray:
        """[rows] when it ends."""
        return self.timeline.end[self.kind]

    @cached_property
    def paints(self) -> list[Paint]:
        """The paints in use, in the order of a legend."""
        return self._painted[0]

    @cached_property
    def paint(self) -> np.ndarray:
        """[rows] which of them each action has."""
        return self._painted[1]

    @cached_property
    def _painted(self) -> tuple[list[Paint], np.ndarray]:
        columns, program = self.timeline.columns, self.timeline.columns.program
        copy, shade = np.zeros(program.stages + 1, int), np.zeros(program.stages + 1, int)  # the last: of no stage
        for rank in range(columns.ranks):
            held = program.stages_of(rank)
            for stage in held:
                beside = [s for s in held if s // program.depth == stage // program.depth]
                copy[stage] = stage // program.depth % 2
                shade[stage] = round(beside.index(stage) * (SHADES - 1) / max(1, len(beside) - 1))
        codes = np.stack((columns.op.astype(int), copy[columns.stage], shade[columns.stage]))
        codes[1:, columns.op > WEIGHT] = 0
        found, paint = np.unique(codes, axis=1, return_inverse=True)
        return [Paint(OPS[op], int(c), int(s)) for op, c, s in found.T.tolist()], paint.ravel()

    @cached_property
    def half(self) -> np.ndarray:
        """[rows] 1 and 2 for the upper and the lower of two actions that are computed at once, else 0."""
        half = np.zeros(self.timeline.columns.rows, int)
        half[self.timeline.pairs], half[self.timeline.pairs + 1] = 1, 2
        return half

    @cached_property
    def live(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each pipeline rank, times in order and what is alive from each on: bytes, or activations.

        As `Timeline.peak_bytes` counts it: from the begin of a forward to the end of what frees it.
        """
        columns = self.timeline.columns
        activation = 1.0 if self.activation is None else self.activation
        kept = activation if self.kept_for_weight is None else self.kept_for_weight
        whole, half = (np.broadcast_to(np.asarray(b, float), columns.program.stages) for b in (activation, kept))
        change, at = np.zeros(columns.rows), self.end.copy()
        for code, amount in ((FORWARD, whole), (BACKWARD, -whole), (INPUT, half - whole), (WEIGHT, -half)):
            rows = columns.op == code
            change[rows] = amount[columns.stage[rows]]
        change[columns.part >= 0] /= columns.program.parts
        at[columns.op == FORWARD] = self.start[columns.op == FORWARD]
        series = []
        for begin, end in zip(columns.offset[:-1], columns.offset[1:], strict=True):
            rows = begin + np.flatnonzero(change[begin:end])  # in the rank's order, which is that of time
            series.append((at[rows], np.cumsum(change[rows])))
        return series

    @cached_property
    def peak(self) -> np.ndarray:
        """[ranks] the most that is alive at once."""
        return np.array([values.max(initial=0.0) for _, values in self.live])

    @property
    def first(self) -> float:
        """When the first action begins."""
        return float(self.start.min(initial=np.inf))

    def summary(self) -> dict[str, str]:
        """The table's row: step time, bubble, memory, communication, weight versions, then `facts`."""
        timeline = self.timeline
        sent = np.bincount(timeline.messages.source, minlength=timeline.ranks)
        peak = self.peak.max(initial=0.0)
        row = {
            "step": span(timeline.step_time, seconds=self.seconds),
            "bubble": f"{100 * timeline.bubble if timeline.compute_span else 0:.1f} %",
            "peak live activations": f"{timeline.peak_live.max():.3g}",
        }
        if self.activation is not None:
            row["peak activation memory"] = amount(peak)
        row["messages"] = f"{sent.sum():,}"
        if self.message_bytes is not None:
            row["sent per rank, at most"] = amount(sent.max(initial=0) * self.message_bytes)
        row["weight versions"] = str(timeline.weight_versions.max())
        return row | self.facts


def table(charts: Sequence[Chart]) -> tuple[list[str], list[list[str]]]:
    """A heading for each column and a row for each chart; what a chart does not know is a dash."""
    rows = [{"": chart.name, **chart.summary()} for chart in charts]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    if all(row.get("weight versions") == "1" for row in rows):
        headings.remove("weight versions")
    return headings, [[row.get(heading, "–") for heading in headings] for row in rows]


def legend(charts: Sequence[Chart]) -> list[tuple[Paint, str]]:
    """The paints that can be seen in several charts, each with what it means: of all shades the first."""
    order = list(NAMES)
    seen = {chart.paints[i] for chart in charts for i in np.unique(chart.paint[chart.end > chart.start])}
    used = sorted(seen, key=lambda p: (p.copy, order.index(p.op), p.shade))
    named: dict[tuple[Op, int], tuple[Paint, str]] = {}
    for paint in used:
        where = ", second copy" if paint.copy else ""
        named.setdefault((paint.op, paint.copy), (paint, NAMES[paint.op] + where))
    return list(named.values())




# ---- numbers as text -----------------------------------------------------------------------------------------------


def span(time: float, *, seconds: bool) -> str:
    """A length of time with its unit.

    >>> span(0.01234, seconds=True), span(2.5e-5, seconds=True), span(37.0, seconds=False)
    ('12.3 ms', '25 µs', '37 T')
    """
    if not seconds:
        return f"{time:.4g} T"
    factor, unit = scale(abs(time))
    return f"{time * factor:.3g} {unit}" if abs(time * factor) < 1000 else f"{time * factor:.0f} {unit}"


def scale(time: float) -> tuple[float, str]:
    """The unit in which a time [s] is best written, and how many of it are a second."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if time * factor >= 1:
            return factor, unit
    return 1e6, "µs"


def amount(size: float) -> str:
    """Bytes with a binary prefix.

    >>> amount(1536), amount(3 << 30)
    ('1.5 KiB', '3 GiB')
    """
    power = 0
    while abs(size) >= 1024 and power < 5:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def ticks(begin: float, end: float, most: int) -> list[float]:
    """At most so many round times (1, 2 or 5 times a power of ten apart) within a span."""
    if end <= begin or most < 1:
        return [begin]
    step = 10.0 ** np.floor(np.log10((end - begin) / most))
    step = next(step * k for k in (1, 2, 5, 10) if (end - begin) / (step * k) <= most)
    return [float(k * step) for k in range(int(np.ceil(begin / step - 1e-9)), int(np.floor(end / step + 1e-9)) + 1)]
