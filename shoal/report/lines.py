"""Lines over a size, on logarithmic axes: times of algorithms, bandwidths over message sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log10

from shoal.report.svg import FAINT, GRID, INK, Canvas

COLOURS = ("#2563eb", "#e07b1a", "#0f9d76", "#c026a8", "#7c5cd6", "#b3261e", "#0891b2", "#8a6d1a", "#4b5563")
LEFT, TOP, BOTTOM = 70, 34, 44  # around the axes
LABEL, LINE = 132, 15  # width of the names on the right, and the least distance between two

Points = Sequence[tuple[float, float]]


def lines(
    title: str,
    series: Mapping[str, Points],
    *,
    width: float,
    height: float,
    x: tuple[str, Callable[[float], str]],
    y: tuple[str, Callable[[float], str]],
    dashed: frozenset[str] = frozenset(),
    marks: Sequence[tuple[float, float, str]] = (),
    dots: bool = False,
    from_zero: bool = False,
    lowest: float | None = None,
) -> Canvas:
    """A chart whose lines carry their names at their right ends.

    Args:
        series: by name, points in rising x; all positive.
        x: the axis' title, and how a number on it is written.
        y: the same.
        dashed: names of the lines that are drawn dashed and grey.
        marks: points (x, y) to emphasise, each with a word.
        dots: whether the points themselves are shown.
        from_zero: whether y is linear and starts at 0.
        lowest: where a logarithmic y starts, if lower than all points.
    """
    canvas = Canvas()
    xs = [point[0] for points in series.values() for point in points]
    ys = [point[1] for points in series.values() for point in points]
    ys += [] if lowest is None else [lowest]
    right, bottom = width - LABEL, height - BOTTOM
    low_x, high_x = log10(min(xs)), log10(max(xs))
    if high_x == low_x:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    low_y, high_y = (0.0, max(ys) * 1.08) if from_zero else (log10(min(ys)), max(log10(max(ys)), log10(min(ys)) + 0.5))

    def at(px: float, py: float) -> tuple[float, float]:
        up = py if from_zero else log10(py)
        return (
            LEFT + (log10(px) - low_x) / (high_x - low_x) * (right - LEFT),
            bottom - (up - low_y) / (high_y - low_y) * (bottom - TOP),
        )

    canvas.text(0, 16, title, size=14, font_weight=600)
    _axes(canvas, at, (low_x, high_x), (low_y, high_y), right, bottom, x, y, from_zero)
    ends = []
    solid = [name for name in series if name not in dashed]
    for name, points in series.items():
        colour = FAINT if name in dashed else COLOURS[solid.index(name) % len(COLOURS)]
        places = [at(*point) for point in points]
        path = "M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        dash = {"stroke_dasharray": "5 4"} if name in dashed else {}
        canvas.add("path", d=path, fill="none", stroke=colour, stroke_width=2, stroke_linejoin="round", **dash)
        for px, py in places if dots else ():
            canvas.add("circle", cx=px, cy=py, r=2.6, fill=colour)
        ends.append((places[-1][1], name, colour))
    for px, py, word in marks:
        cx, cy = at(px, py)
        canvas.add("circle", cx=cx, cy=cy, r=5, fill="#ffffff", stroke=INK, stroke_width=2)
        canvas.text(cx, cy - 11, word, size=11, anchor="middle", font_weight=600, paint_order="stroke",
                    stroke="#ffffff", stroke_width=4)
    ends.sort()
    for (end, name, colour), label in zip(ends, _apart([end for end, _, _ in ends], bottom), strict=True):
        leader = f"M{right + 2} {end:.1f} L{right + 12} {label:.1f}"
        canvas.add("path", d=leader, stroke=colour, fill="none", opacity=0.6)
        canvas.text(right + 15, label + 4, name, size=11.5, fill=colour)
    return canvas


def _axes(
    canvas: Canvas,
    at: Callable[[float, float], tuple[float, float]],
    span_x: tuple[float, float],
    span_y: tuple[float, float],
    right: float,
    bottom: float,
    x: tuple[str, Callable[[float], str]],
    y: tuple[str, Callable[[float], str]],
    from_zero: bool,
) -> None:
    """Grid, numbers and titles."""
    decades = range(ceil(span_x[0] - 1e-9), floor(span_x[1] + 1e-9) + 1)
    height = 0.0 if from_zero else 10.0 ** span_y[0]
    for power in decades[:: max(1, ceil(len(decades) * 52 / (right - LEFT)))]:
        px, _ = at(10.0**power, height)
        canvas.add("path", d=f"M{px:.1f} {TOP} V{bottom}", stroke=GRID)
        canvas.text(px, bottom + 16, x[1](10.0**power), size=11, fill=FAINT, anchor="middle")
    left = 10 ** span_x[0]
    for value in _ticks(span_y[1]) if from_zero else _log_ticks(*span_y):
        _, py = at(left, value)
        canvas.add("path", d=f"M{LEFT} {py:.1f} H{right}", stroke=GRID)
        canvas.text(LEFT - 7, py + 4, y[1](value), size=11, fill=FAINT, anchor="end")
    canvas.add("path", d=f"M{LEFT} {TOP} V{bottom} H{right}", stroke=FAINT, fill="none")
    canvas.text((LEFT + right) / 2, bottom + 35, x[0], size=11.5, fill=FAINT, anchor="middle")
    if y[0]:
        canvas.text(LEFT, TOP - 6, y[0], size=11.5, fill=FAINT)


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to the top, at most 7.

    >>> _ticks(50.0), _ticks(99.0)
    ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], [0.0, 20.0, 40.0, 60.0, 80.0])
    """
    step = 10.0 ** floor(log10(top))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if top / (step * part) <= 6)
    return [k * step for k in range(int(top / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten: 1, 2, 5 in each decade where there are few decades."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    values = [factor * 10.0**power for power in range(floor(low) - 1, ceil(high) + 1) for factor in factors]
    return [value for value in values if low - 1e-9 <= log10(value) <= high + 1e-9]


def _apart(wanted: list[float], bottom: float) -> list[float]:
    """Places for labels near where they should be, in order, none over another, none below the axis."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + LINE) if places else max(y, TOP))
    limit = bottom
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - LINE
    return places
