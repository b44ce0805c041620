"""What a run's tensors hold, octave by octave, under the ranges of the number formats: a row for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.engine.precision.histogram import BINS, PER_OCTAVE, bin_of, limits, octave_of, shares
from shoal.spec.number_formats import BF16, E4M3, E5M2, FP16, Format
from shoal.training.records.histograms import KINDS, Histogram

FORMATS: dict[str, tuple[Format, bool]] = {
    "fp16": (FP16, False), "bf16": (BF16, False), "e5m2": (E5M2, False), "e4m3": (E4M3, False),
    "e5m2, scaled": (E5M2, True), "e4m3, scaled": (E4M3, True),
}  # fmt: skip
"""Those that the shares are told for; scaled is by a power of two for each tensor."""

BARS = ("fp16", "e5m2", "e4m3")  # whose ranges end inside the picture
LOWEST, HIGHEST = -60, 20  # octaves that are drawn; what lies below is in the first, what lies above in the last
LEFT, CELL, ROW, TOP = 190, 7.0, 13, 62
COLUMN = 84  # of a format's share
NOTE = (
    "Each row is a tensor, each cell an octave, darker for more of its numbers. Bars show what a format can hold, from "
    "half of its smallest number on. On the right: the part of the numbers (0 left out) that would become 0 and, after "
    "a plus, that would be too large."
)
PART = " Of experts and routers, which are no linear layers, weights and gradients alone are counted."


def histograms(step: int, tensors: Sequence[Histogram]) -> str:
    """A picture for each kind of tensor."""
    note = NOTE + PART * any(".experts." in tensor.name or ".router" in tensor.name for tensor in tensors)
    parts = [f"<h2>What the tensors hold, step {step}</h2><p class=note>{escape(note)}</p>"]
    for kind in KINDS:
        rows = [tensor for tensor in tensors if tensor.kind == kind]
        if rows:
            parts.append(f"<h3>{escape(kind)}</h3><div class=scroll>{picture(rows)}</div>")
    return "".join(parts)


def picture(rows: Sequence[Histogram]) -> str:
    """The rows of one kind as SVG, in the page's own ink."""
    right = LEFT + CELL * (HIGHEST - LOWEST + 1)
    width, height = right + COLUMN * len(FORMATS) + 8, TOP + ROW * len(rows) + 22
    marks = [*_bars(height), *_axis(height - 8)]
    for i, name in enumerate(FORMATS):
        marks.append(_text(right + COLUMN * (i + 1), TOP - 8, name, "end"))
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        marks.append(_text(LEFT - 6, y + ROW - 3, row.name.removesuffix(".weight"), "end"))
        marks += _cells(row, y)
        for column, (kind, scaled) in enumerate(FORMATS.values(), 1):
            marks.append(_text(right + COLUMN * column, y + ROW - 3, share(row, kind, scaled=scaled), "end"))
    return (
        f'<svg viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" role="img" font-size="10.5" '
        f'aria-label="Histograms by octave of {len(rows)} tensors">{"".join(marks)}</svg>'
    )


def share(row: Histogram, kind: Format, *, scaled: bool) -> str:
    """What a format loses of a tensor: the part that becomes 0, and that which is too large."""
    below, above = shares(row.counts, kind, scaled=scaled)
    return _percent(below) + (f" + {_percent(above)}" if above else "")


def _percent(part: float) -> str:
    if part == 0:
        return ""
    return "<0.01%" if part < 1e-4 else f"{100 * part:.2f}%" if part < 0.1 else f"{100 * part:.0f}%"


def octaves(row: Histogram) -> dict[int, int]:
    """How many numbers are in each octave that is drawn; 0 is left out."""
    found: dict[int, int] = {}
    for i in range(1, BINS):
        if row.counts[i]:
            octave = min(HIGHEST, max(LOWEST, octave_of(i)))
            found[octave] = found.get(octave, 0) + row.counts[i]
    return found


def _cells(row: Histogram, y: float) -> list[str]:
    found = octaves(row)
    total, most = sum(found.values()), max(found.values(), default=1)
    cells = []
    for octave, n in sorted(found.items()):
        told = f"{row.name}: {100 * n / total:.2g} % between 2^{octave} and 2^{octave + 1}"
        cells.append(
            f'<rect x="{_x(bin_of(2.0**octave)):g}" y="{y}" width="{CELL - 0.5:g}" height="{ROW - 1}" fill="#2f6fb5" '
            f'opacity="{0.08 + 0.92 * n / most:.2f}"><title>{escape(told)}</title></rect>'
        )
    return cells


def _bars(height: float) -> list[str]:
    marks = []
    for i, name in enumerate(BARS):
        low, high = limits(FORMATS[name][0])
        start, stop = _x(low), _x(high + 1)
        y = 8 + 14 * i
        marks.append(f'<path d="M{start:g} {y} H{stop:g}" stroke="#b5562f" stroke-width="3"/>')
        marks.append(_text(start - 5, y + 4, name, "end"))
        marks += [
            f'<path d="M{x:g} {y} V{height - 22}" stroke="#b5562f" stroke-width="0.7" stroke-dasharray="2 3"/>'
            for x in (start, stop)
        ]
    return marks


def _axis(y: float) -> list[str]:
    return [_text(_x(bin_of(2.0**octave)), y, f"2^{octave}", "start") for octave in range(LOWEST, HIGHEST + 1, 10)]


def _x(bin: int) -> float:
    """Where a bin begins."""
    return LEFT + CELL / PER_OCTAVE * (bin - bin_of(2.0**LOWEST))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'
