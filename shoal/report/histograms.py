"""Histograms of a run's tensors by octave, with the ranges of the number formats: a row for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from shoal.engine.precision.histogram import BINS, PER_OCTAVE, find_bin, limits, shares, to_octave
from shoal.report.charts import hide_frame, new_figure, styled, to_svg
from shoal.spec.number_formats import BF16, E4M3, E5M2, FP16, Format
from shoal.training.records.histograms import KINDS, Histogram

FORMATS: dict[str, tuple[Format, bool]] = {
    "fp16": (FP16, False), "bf16": (BF16, False), "e5m2": (E5M2, False), "e4m3": (E4M3, False),
    "e5m2, scaled": (E5M2, True), "e4m3, scaled": (E4M3, True),
}  # fmt: skip
"""Formats whose losses are shown, and whether each tensor is first scaled by a power of two."""

BARS = ("fp16", "e5m2", "e4m3")  # formats whose ranges end inside the picture
LOWEST, HIGHEST = -60, 20  # octaves drawn; the first and last include everything below and above
RANGES = "#b5562f"
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


@styled
def picture(rows: Sequence[Histogram]) -> str:
    """Draw the rows of one kind."""
    found = np.array([[octaves(row).get(octave, 0) for octave in range(LOWEST, HIGHEST + 1)] for row in rows])
    figure, (axes,) = new_figure(1150, 90 + 15 * len(rows))
    axes.imshow(found / found.max(axis=1, keepdims=True).clip(1), cmap="Blues", aspect="auto",
                extent=(LOWEST, HIGHEST + 1, len(rows), 0))  # fmt: skip
    axes.set_yticks(np.arange(len(rows)) + 0.5, [row.name.removesuffix(".weight") for row in rows])
    axes.set_xticks(range(LOWEST, HIGHEST + 1, 10), [f"2^{octave}" for octave in range(LOWEST, HIGHEST + 1, 10)])
    for i, name in enumerate(BARS, -len(BARS)):
        first, last = limits(FORMATS[name][0])
        low, high = (LOWEST + (bin - find_bin(2.0**LOWEST)) / PER_OCTAVE for bin in (first, last + 1))
        axes.plot([low, high], [i, i], color=RANGES, linewidth=3, solid_capstyle="butt")
        axes.text(low, i, f"{name} ", ha="right", va="center")
        axes.vlines([low, high], i, len(rows), color=RANGES, linewidth=0.7, linestyles=":")
    for column, (name, (kind, scaled)) in enumerate(FORMATS.items()):
        x = HIGHEST + 12 * (column + 1)
        axes.text(x, -0.5, name.replace(", ", "\n"), ha="right", linespacing=1)
        for i, row in enumerate(rows):
            axes.text(x, i + 0.5, share(row, kind, scaled=scaled), ha="right", va="center")
    axes.set(xlim=(LOWEST, HIGHEST + 1 + 12 * len(FORMATS)), ylim=(len(rows), -len(BARS) - 1))
    hide_frame(axes)
    return to_svg(figure, inline=True, title=f"Histograms by octave of {len(rows)} tensors")


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
