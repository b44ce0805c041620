"""A file of timelines, of the kind that its name ends in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.files import check_writable
from shoal.report.page import HELP, comparison, page, timelines
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.figure import write_figure
from shoal.report.timeline.trace import write_trace

KINDS = (".html", ".svg", ".png", ".json", ".json.gz")
"""What a file's name may end in: a page, a figure or a trace."""


def write(path: Path, charts: Sequence[Chart], *, title: str, lead: str) -> None:
    """Write timelines as a page (.html), a figure for a paper (.svg, .png) or a trace (.json, .json.gz).

    Args:
        charts: whose times are all in the same unit.
        title: of a page, plain text.
        lead: what the page shows, in a sentence or two of plain text.

    Raises:
        UsageError: the name ends in nothing of these, or the folder is not there.
    """
    check_writable(path, "--out", *KINDS)
    if path.suffix == ".html":
        path.write_text(page(title, lead, [comparison(charts), timelines(charts), HELP]), encoding="utf-8")
    elif path.suffix in (".svg", ".png"):
        write_figure(path, charts)
    else:
        write_trace(path, charts)
