"""`shoal report`: show how a run went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section


class ReportOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder."""

    out: Path | None = None
    """File to write: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz). Default: report.html in the
    run folder."""


def run(options: ReportOptions) -> int:
    """Write the report, and print a summary."""
    written = shoal.write_report(options.run_folder, options.out)
    from shoal.report.run import print_report

    print_report(Console(highlight=False), written)
    return 0
