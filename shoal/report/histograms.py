"""Histograms of a run's tensors by octave, with the ranges of the number formats: a row for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.engine.precision.histogram import BINS, PER_OCTAVE, find_bin, limits, shares, to_octave
from shoal.report.svg import Canvas
from shoal.spec.number_formats import BF16, E4M3, E5M2, FP16, Format
from shoal.training.records.histograms import KINDS, Histogram

FORMATS: dict[str, tuple[Format, bool]] = {
    "fp16": (FP16, False), "bf16": (BF16, False), "e5m2": (E5M2, False), "e4m3": (E4M3, False),
    "e5m2, scaled": (E5M2, True), "e4m3, scaled": (E4M3, True),
}  # fmt: skip
"""Formats whose losses are shown, and whether each tensor is first scaled by a power of two."""

BARS = ("fp16", "e5m2", "e4m3")  # formats whose ranges end inside the picture
LOWEST, HIGHEST = -60, 20  # octaves drawn; the first and last include everything below and above
LEFT, CELL, ROW, TOP = 190, 7.0, 13, 62
COLUMN = 84  # width of a format's column
SIZE = 10.5  # font size
CELLS, RANGES = "#2f6fb5", "#b5562f"
NOTE = (
    "Each row is a tensor, each cell an octave, darker for more of its numbers. Bars show the range of a format, from "
    "half of its smallest number on. On the right: the fraction of the nonzero numbers that would underflow to 0 and, "
    "after a plus, that would overflow."
)
PART = " Experts and routers are not linear layers: only their weights and gradients are counted."


def histograms(step: int, tensors: Sequence[Histogram]) -> str:
    """Return the markup of one picture for each kind of tensor."""
    note = NOTE + PART * any(".experts." in tensor.name or ".router" in tensor.name for tensor in tensors)
    parts = [f"<h2>Values of the tensors, step {step}</h2><p class=note>{escape(note)}</p>"]
    for kind in KINDS:
        rows = [tensor for tensor in tensors if tensor.kind == kind]
        if rows:
            parts.append(f"<h3>{escape(kind)}</h3><div class=scroll>{picture(rows)}</div>")
    return "".join(parts)


def picture(rows: Sequence[Histogram]) -> str:
    """Draw the rows of one kind."""
    canvas = Canvas()
    right, bottom = LEFT + CELL * (HIGHEST - LOWEST + 1), TOP + ROW * len(rows)
    _draw_ranges(canvas, bottom)
    for octave in range(LOWEST, HIGHEST + 1, 10):
        canvas.text(_x(find_bin(2.0**octave)), bottom + 14, f"2^{octave}", size=SIZE)
    for column, name in enumerate(FORMATS, 1):
        canvas.text(right + COLUMN * column, TOP - 8, name, size=SIZE, anchor="end")
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        canvas.text(LEFT - 6, y + ROW - 3, row.name.removesuffix(".weight"), size=SIZE, anchor="end")
        _draw_cells(canvas, row, y)
        for column, (kind, scaled) in enumerate(FORMATS.values(), 1):
            words = share(row, kind, scaled=scaled)
            canvas.text(right + COLUMN * column, y + ROW - 3, words, size=SIZE, anchor="end")
    title = f"Histograms by octave of {len(rows)} tensors"
    return canvas.document(right + COLUMN * len(FORMATS) + 8, bottom + 22, title, inline=True)


def share(row: Histogram, kind: Format, *, scaled: bool) -> str:
    """Return the fractions of a tensor that underflow to 0 and that overflow in a format."""
    below, above = shares(row.counts, kind, scaled=scaled)
    return _percent(below) + (f" + {_percent(above)}" if above else "")


def _percent(part: float) -> str:
    if part == 0:
        return ""
    return "<0.01%" if part < 1e-4 else f"{100 * part:.2f}%" if part < 0.1 else f"{100 * part:.0f}%"


def octaves(row: Histogram) -> dict[int, int]:
    """Count the nonzero numbers in each drawn octave."""
    found: dict[int, int] = {}
    for i in range(1, BINS):
        if row.counts[i]:
            octave = min(HIGHEST, max(LOWEST, to_octave(i)))
            found[octave] = found.get(octave, 0) + row.counts[i]
    return found


def _draw_cells(canvas: Canvas, row: Histogram, y: float) -> None:
    found = octaves(row)
    total, most = sum(found.values()), max(found.values(), default=1)
    for octave, n in sorted(found.items()):
        words = f"{row.name}: {100 * n / total:.2g} % between 2^{octave} and 2^{octave + 1}"
        canvas.rect(_x(find_bin(2.0**octave)), y, CELL - 0.5, ROW - 1, CELLS, opacity=0.08 + 0.92 * n / most,
                    content=f"<title>{escape(words)}</title>")


def _draw_ranges(canvas: Canvas, bottom: float) -> None:
    for i, name in enumerate(BARS):
        low, high = limits(FORMATS[name][0])
        start, stop, y = _x(low), _x(high + 1), 8 + 14 * i
        canvas.rect(start, y - 1.5, stop - start, 3, RANGES)
        canvas.text(start - 5, y + 4, name, size=SIZE, anchor="end")
        for x in (start, stop):
            canvas.add("path", d=f"M{x:g} {y} V{bottom}", stroke=RANGES, stroke_width=0.7, stroke_dasharray="2 3")


def _x(bin: int) -> float:
    """Return the x coordinate of a bin's start."""
    return LEFT + CELL / PER_OCTAVE * (bin - find_bin(2.0**LOWEST))
