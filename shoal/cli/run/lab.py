"""`shoal lab`: one local page with all engines."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from urllib.parse import quote

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_writable, write_atomically
from shoal.base.options import reject_unused
from shoal.cli.run.watch import PageOptions


class LabOptions(PageOptions):
    out: Path | None = None
    """Write the page, with the answers for each panel's first picture and its sliders, as one file (.html), and serve
    nothing."""

    panel: str = ""
    """Panel and state to open, as in the page's URL after the #: timeline?schedule=zb-v (default: the first panel)."""


def run(options: LabOptions) -> int:
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
