"""Colours of actions, distinguishable by hue, by lightness (print, colour-blind readers) and by letter (text).

Forward is blue; backward is warm, with its two halves darker (input) and lighter (weights) than the full one. A second
copy of the model (DualPipe) has its own hues, teal and plum. Further stages of a rank are shades of the first.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.pipeline.program import Op

INK, FAINT, GRID = "#1f2328", "#6b7280", "#e5e7eb"
GROUND = "#fefefe"  # of text on a chart: a white that no part of a chart has, for pages replace it by their own
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input half",
    Op.BACKWARD_WEIGHT: "backward, weight half",
    Op.REDUCE: "gradient reduction",
    Op.STEP: "optimizer",
    Op.GATHER: "parameter gather",
}
HUES = {
    Op.FORWARD: ("#4a7fc1", "#2f9488"),
    Op.BACKWARD: ("#e79245", "#c3618d"),
    Op.BACKWARD_INPUT: ("#cb5a3c", "#963e74"),
    Op.BACKWARD_WEIGHT: ("#f1c667", "#e5a5c4"),
    Op.REDUCE: ("#8c7fb8", "#8c7fb8"),
    Op.STEP: ("#7d8590", "#7d8590"),
    Op.GATHER: ("#a99fcb", "#a99fcb"),
}
"""Colour on a light background of each op's first stage, for the first and the second copy of the model."""

WHITE, BLACK = "#ffffff", "#000000"
SHADES = 4
FADE = 0.42  # how much the last shade is mixed with white


class Paint(NamedTuple):
    """Properties that determine a colour."""

    op: Op
    copy: int = 0
    shade: int = 0

    @property
    def name(self) -> str:
        """Meaning of the paint in a legend."""
        return NAMES[self.op] + (", second copy" if self.copy else "")


def colour(paint: Paint, *, dark: bool = False) -> str:
    """Return the colour of a paint as ``#rrggbb``, for a light or a dark background."""
    hue = HUES[paint.op][paint.copy % 2]
    fade = FADE * paint.shade / (SHADES - 1)
    return mix(mix(hue, BLACK, 0.12), BLACK, fade) if dark else mix(hue, WHITE, fade)


def ink(ground: str) -> str:
    """Return black or white, whichever has more contrast with a colour (WCAG 2.2, relative luminance)."""
    light = luminance(ground)
    return INK if (light + 0.05) / (luminance(INK) + 0.05) > 1.05 / (light + 0.05) else WHITE


def luminance(colour: str) -> float:
    """Return the relative luminance, 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def mix(colour: str, other: str, part: float) -> str:
    """Mix a colour ``#rrggbb`` with a part (0 to 1) of another.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    channels = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)
