"""`shoal report`, `shoal watch` and `shoal lab`: pages."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Annotated
from urllib.parse import quote

from pydantic import Field
from rich.console import Console

import shoal
from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_writable, write_atomically
from shoal.base.options import POSITIONAL, reject_unused
from shoal.base.section import Section


class ReportOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder."""

    out: Path | None = None
    """File to write: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz). Default: report.html in the
    run folder."""


def report(options: ReportOptions) -> int:
    """Write the report, and print a summary."""
    written = shoal.write_report(options.run_folder, options.out)
    from shoal.report.run import print_report

    print_report(Console(highlight=False), written)
    return 0


class PageOptions(Section):
    out: Path | None = None
    """Write the page as one file (.html), with the values of now, and serve nothing."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on 127.0.0.1 (default: a free one)."""

    browser: bool = True
    """Open the page in the browser."""


class WatchOptions(PageOptions):
    runs: Annotated[tuple[Path, ...], POSITIONAL] = ()
    """Run folders."""


def watch(options: WatchOptions) -> int:
    """Serve the page until Ctrl-C, or write it."""
    if not options.runs:
        raise UsageError("name at least one run folder: shoal watch RUN_FOLDER.")
    if options.out:
        reject_unused(options, ("port", "browser"), "--out writes a file and serves nothing")
    written = shoal.watch(options.runs, out=options.out, port=options.port, browser=options.browser)
    if written:
        print(f"written: {written}")
    return 0


class LabOptions(PageOptions):
    panel: str = ""
    """Panel and state to open, as in the page's URL after the #: timeline?schedule=zb-v (default: the first panel)."""


def lab(options: LabOptions) -> int:
    """Serve the lab until Ctrl-C, or write it; return 0."""
    from shoal.labs.interactive.page import build_page, record_answers, saved_html
    from shoal.labs.interactive.panels import PANELS, warm_up

    panel = options.panel.partition("?")[0]
    if panel and panel not in PANELS:
        raise UsageError(f"--panel {options.panel}: there is no panel '{panel}'; {did_you_mean(panel, PANELS)}")
    if options.out:
        check_writable(options.out, "--out", ".html")
        reject_unused(options, ("port", "panel", "browser"), "--out writes a file and serves nothing")
        write_atomically(options.out, saved_html(record_answers()))
        print(f"written: {options.out}")
        return 0
    from shoal.report.server import PageServer

    server = PageServer(build_page(), options.port)
    if panel:
        server.url += f"#{quote(options.panel, safe='?=&,')}"
    Thread(target=warm_up, daemon=True).start()
    server.run(browser=options.browser)
    return 0
