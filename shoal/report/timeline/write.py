"""Write timelines to a file in the format of its suffix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.files import check_writable, write_atomically
from shoal.report.page import HELP, comparison, page, timelines
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.trace import write_trace

KINDS = (".html", ".svg", ".png", ".json", ".json.gz")
"""Supported file suffixes: a page, a figure or a trace."""


def write(path: Path, charts: Sequence[Chart], *, title: str, lead: str) -> None:
    """Write timelines as a page (.html), a figure for a paper (.svg, .png) or a trace (.json, .json.gz).

    Raises:
        UsageError: the suffix is not supported, or the folder does not exist.
    """
    check_writable(path, "--out", *KINDS)
    if path.suffix == ".html":
        write_atomically(path, page(title, lead, [comparison(charts), timelines(charts), HELP]))
    elif path.suffix in (".svg", ".png"):
        from shoal.report.timeline.figure import write_figure  # slow import

        write_figure(path, charts)
    else:
        write_trace(path, charts)
