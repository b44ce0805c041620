"""A file of timelines, of the kind that its name ends in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.report.page import HELP, comparison, page, timelines
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.figure import write_figure
from shoal.report.timeline.trace import write_trace

KINDS = {".html": "a page", ".svg": "a figure", ".png": "a figure", ".json": "a trace", ".json.gz": "a trace"}


def write(path: Path, charts: Sequence[Chart], *, title: str, lead: str) -> None:
    """Write timelines as a page (.html), a figure for a paper (.svg, .png) or a trace (.json, .json.gz).

    Args:
        charts: whose times are all in the same unit.
        title: of a page, plain text.
        lead: what the page shows, in a sentence or two of plain text.

    Raises:
        UsageError: the name ends in nothing of these, or the folder is not there.
    """
    check_name(path)
    if path.suffix == ".html":
        path.write_text(page(title, lead, [comparison(charts), timelines(charts), HELP]), encoding="utf-8")
    elif path.suffix in (".svg", ".png"):
        write_figure(path, charts)
    else:
        write_trace(path, charts)


def check_name(path: Path) -> None:
    """Refuse, before any work, a file that `write` could not write.

    Raises:
        UsageError: the name ends in nothing that it knows, or the folder is not there.
    """
    if not path.name.endswith(tuple(KINDS)):
        known = ", ".join(f"{suffix} ({what})" for suffix, what in KINDS.items())
        raise UsageError(f"{path}: it cannot be told what to write.\n  End the name in one of {known}.")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}.\n  Make it, or name another file.")
