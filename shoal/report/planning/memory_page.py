"""HTML page of a dry run: memory of a rank over its first steps, per action, predicted and measured."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.base.units import show_bytes
from shoal.planning.estimate import Estimate
from shoal.report.charts import new_figure, styled, to_svg
from shoal.report.page import page
from shoal.report.svg import FAINT
from shoal.report.tables import html_table

if TYPE_CHECKING:
    from shoal.training.dry_run.dry_run import Counted

KEPT, PEAK, MEASURED = "#4a7fc1", "#b9cde8", "#cb5a3c"


def write_memory_page(path: Path, estimate: Estimate, counted: Counted, measured: Counted | None) -> None:
    """Write the page as one file."""
    rows = [(name, show_bytes(size)) for name, size in counted.held.items() if size]
    layout = estimate.run.layout
    lead = f"{counted.where} of {layout.world_size:,}; {layout.describe()}; {len(counted.steps)} steps."
    parts = [
        "<h2>Memory, action by action</h2>", memory_profile(counted, measured),
        "<h2>Between steps</h2>", html_table(rows),
    ]  # fmt: skip
    path.write_text(page("Dry run", lead, parts), encoding="utf-8")


@styled
def memory_profile(counted: Counted, measured: Counted | None = None) -> str:
    """Draw the bytes alive after each action (filled), the peak within it (pale) and the measured peak (line)."""
    moments = [moment for step in counted.steps for moment in step.moments]
    figure, (axes,) = new_figure(760, 330)
    edges = [*range(len(moments) + 1)]
    axes.stairs([m.peak for m in moments], edges, fill=True, color=PEAK, label="most in an action")
    axes.stairs([m.alive for m in moments], edges, fill=True, color=KEPT, label="alive after it")
    if measured:
        peaks = [moment.peak for step in measured.steps for moment in step.moments]
        axes.stairs(peaks, [*range(len(peaks) + 1)], color=MEASURED, linewidth=1.5, label="most, measured")
    begins = [0, *accumulate(len(step.moments) for step in counted.steps)][:-1]
    for begin in begins:
        axes.axvline(begin, color=FAINT, linestyle=":", linewidth=1)
    axes.set_xticks(begins, [f"step {i + 1}" for i in range(len(begins))], ha="left")
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(size))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    return to_svg(figure, inline=True)
