"""The page of a dry run: memory of a rank over its first steps, action by action, predicted over measured."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.base.units import show_bytes
from shoal.planning.estimate import Estimate
from shoal.report.planning.page_parts import html_table, write
from shoal.report.svg import FAINT, GRID, Canvas

if TYPE_CHECKING:
    from shoal.training.dry_run.dry_run import Counted

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 320, 90, 40
KEPT, PEAK, MEASURED = "#4a7fc1", "#b9cde8", "#cb5a3c"


def write_memory_page(path: Path, estimate: Estimate, counted: Counted, measured: Counted | None) -> None:
    """Write the page as one file."""
    rows = [(name, show_bytes(size)) for name, size in counted.held.items() if size]
    layout = estimate.run.layout
    lead = f"{counted.where} of {layout.world_size:,}; {layout.describe()}; {len(counted.steps)} steps."
    parts = ["<h2>Memory, action by action</h2>", memory_profile(counted, measured)]
    write(path, "Dry run", lead, [*parts, "<h2>Between steps</h2>", html_table(rows)])


def memory_profile(counted: Counted, measured: Counted | None = None) -> str:
    """Bytes alive after each action (filled) and at most in it (pale); those measured, at most, as a line."""
    moments = [moment for step in counted.steps for moment in step.moments]
    beside = [moment.peak for step in measured.steps for moment in step.moments] if measured else []
    top = 1.08 * max([moment.peak for moment in moments] + beside)
    each = (WIDTH - LEFT - 10) / len(moments)
    canvas = Canvas()

    def y(size: float) -> float:
        return 30 + (HEIGHT - 30 - BOTTOM) * (1 - size / top)

    for fraction in (0, 0.25, 0.5, 0.75, 1):
        canvas.add("line", x1=LEFT, x2=WIDTH - 10, y1=y(fraction * top), y2=y(fraction * top), stroke=GRID)
        canvas.text(LEFT - 8, y(fraction * top) + 4, show_bytes(fraction * top), anchor="end", fill=FAINT, size=11)
    for colour, sizes in ((PEAK, [m.peak for m in moments]), (KEPT, [m.alive for m in moments])):
        canvas.add("path", d=_area([y(size) for size in sizes], each, y(0)), fill=colour)
    if beside:
        points = " ".join(f"{LEFT + (i + side) * each:.1f},{y(size):.1f}" for i, size in enumerate(beside)
                          for side in (0, 1))
        canvas.add("polyline", points=points, fill="none", stroke=MEASURED, stroke_width=1.5)
    ends = [*accumulate(len(step.moments) for step in counted.steps)]
    for number, end in enumerate(ends):
        start = LEFT + (ends[number - 1] if number else 0) * each
        canvas.add("line", x1=start, x2=start, y1=30, y2=HEIGHT - BOTTOM, stroke=FAINT, stroke_dasharray="2 4")
        canvas.text((start + LEFT + end * each) / 2, HEIGHT - BOTTOM + 18, f"step {number + 1}", anchor="middle")
    names = [(KEPT, "alive after an action"), (PEAK, "most in it")] + [(MEASURED, "most, measured")] * bool(beside)
    for i, (colour, name) in enumerate(names):
        canvas.add("rect", x=LEFT + 190 * i, y=8, width=11, height=11, fill=colour)
        canvas.text(LEFT + 190 * i + 16, 18, name)
    return canvas.document(WIDTH, HEIGHT, "Memory of a rank over its first steps")


def _area(heights: list[float], each: float, floor: float) -> str:
    points = "".join(f"L{LEFT + i * each:.1f} {h:.1f}H{LEFT + (i + 1) * each:.1f}" for i, h in enumerate(heights))
    return f"M{LEFT} {floor:.1f}{points}V{floor:.1f}Z"
